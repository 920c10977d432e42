{{- define "workload.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "workload.selector" . }}
{{- end }}

{{- define "workload.selector" -}}
app.kubernetes.io/name: resiliency-host
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "workload.serviceAccount" -}}
{{ .Values.workload.serviceAccount.name | default .Release.Name }}
{{- end }}

{{- /* Hosts that train at full size. */ -}}
{{- define "workload.needed" -}}
{{ mul .Values.workload.num_dp_replicas .Values.workload.num_nodes_per_dp }}
{{- end }}

{{- define "workload.spares" -}}
{{- if hasKey .Values.workload "spares" -}}
{{ int .Values.workload.spares }}
{{- else -}}
{{ ternary 1 0 .Values.infrastructure.use_supervisor }}
{{- end -}}
{{- end }}

{{- define "workload.ranks" -}}
{{ .Values.workload.workers_per_host | default .Values.workload.gpus_per_node | int }}
{{- end }}

{{- /* Where the local tier is; "": there is none. */ -}}
{{- define "workload.localDir" -}}
{{- if .Values.infrastructure.enable_multi_tier_checkpointing -}}
/local
{{- else if .Values.workload.ram_disk -}}
/pod/ram
{{- end -}}
{{- end }}

{{- define "workload.flags" -}}
{{- $flags := .Values.workload.flags -}}
{{- if kindIs "string" $flags -}}
{{- $flags = regexSplit "\\s+" (trim $flags) -1 | compact -}}
{{- end -}}
{{- toYaml $flags -}}
{{- end }}

{{- /* The script with all its arguments. */ -}}
{{- define "workload.script" -}}
{{- $checkpointing := .Values.workload.checkpointing -}}
{{- $words := concat .Values.workload.script (include "workload.flags" . | fromYamlArray) -}}
{{- if gt (int $checkpointing.local_ckpt_interval) 0 -}}
{{- $folder := $checkpointing.local_ckpt_dir | default (include "workload.localDir" .) -}}
{{- $words = concat $words (list "--local-ckpt-dir" $folder "--local-ckpt-interval" (int $checkpointing.local_ckpt_interval | toString)) -}}
{{- end -}}
{{- if gt (int $checkpointing.persistent_ckpt_interval) 0 -}}
{{- $words = concat $words (list "--persistent-ckpt-dir" $checkpointing.persistent_ckpt_dir "--persistent-ckpt-interval" (int $checkpointing.persistent_ckpt_interval | toString)) -}}
{{- end -}}
{{- if .Values.workload.enable_tensorboard -}}
{{- $words = append $words "--enable-tensorboard" -}}
{{- end -}}
{{- toYaml $words -}}
{{- end }}

{{- /* The command line of the container. Process 1 is never a shell: it must get SIGTERM. */ -}}
{{- define "workload.command" -}}
{{- $words := list -}}
{{- $ranks := include "workload.ranks" . -}}
{{- if .Values.infrastructure.use_supervisor -}}
{{- $words = list "resiliency" "pod" "--supervisor" .Values.infrastructure.supervisor_address "--token-file" "/etc/resiliency/token/token" -}}
{{- if .Values.infrastructure.supervisor_ca -}}
{{- $words = concat $words (list "--ca" "/etc/resiliency/ca/ca.crt") -}}
{{- end -}}
{{- $words = concat $words (list "--address" "$(POD_IP)" "--host" "$(POD_NAME)" "--nproc-per-node" $ranks "--state-dir" "/pod/state") -}}
{{- $words = concat $words (list "--stop-timeout" (int .Values.workload.save_timeout_s | toString) "--drain-timeout" (int .Values.workload.drain_timeout_s | toString)) -}}
{{- range .Values.workload.watchdogs -}}
{{- $words = concat $words (list "--watchdog" .) -}}
{{- end -}}
{{- with .Values.workload.launcher_args -}}
{{- $words = append $words (printf "--launcher-args=%s" (join " " .)) -}}
{{- end -}}
{{- $words = append $words "--" -}}
{{- else -}}
{{- $first := printf "%s-host-0-0.%s:29500" .Release.Name .Release.Name -}}
{{- $words = list "resiliency" "run" "--nnodes" (include "workload.needed" .) "--nproc-per-node" $ranks "--rdzv-backend" "c10d" "--rdzv-endpoint" $first "--rdzv-id" .Release.Name "--local-addr" "$(POD_IP)" -}}
{{- $restarts := ternary .Values.infrastructure.max_in_job_restarts 3 (hasKey .Values.infrastructure "max_in_job_restarts") -}}
{{- $words = concat $words (list "--max-restarts" (int $restarts | toString) "--shutdown-timeout" (int .Values.workload.save_timeout_s | toString)) -}}
{{- $words = concat $words .Values.workload.launcher_args -}}
{{- end -}}
{{- toYaml (concat $words (include "workload.script" . | fromYamlArray)) -}}
{{- end }}
