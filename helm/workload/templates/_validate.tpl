{{- /* Values that contradict each other. What a single value may be is in values.schema.json. */ -}}
{{- define "workload.validate" -}}
{{- $w := .Values.workload -}}
{{- $i := .Values.infrastructure -}}
{{- $c := $w.checkpointing -}}
{{- if not $w.image -}}
{{- fail "workload.image: name an image with torch, this library and your script (Dockerfile, target `job`)" -}}
{{- end -}}
{{- if not (int (include "workload.ranks" .)) -}}
{{- fail "workload.workers_per_host: say how many ranks a host has, because gpus_per_node is 0" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) -}}
{{- fail (printf "the name of the release, %s, is no name for a JobSet: it must begin with a letter and have no dots, as in llama3-1" .Release.Name) -}}
{{- end -}}
{{- $hosts := add (include "workload.needed" .) (include "workload.spares" .) -}}
{{- $longest := len (printf "%s-host-%d-0-abcde" .Release.Name $hosts) -}}
{{- if gt $longest 63 -}}
{{- fail (printf "the name of the release, %s, is too long: pods would have names of %d characters, and 63 are allowed" .Release.Name $longest) -}}
{{- end -}}
{{- if and (kindIs "string" $w.flags) (regexMatch "[\"'`\\\\]" $w.flags) -}}
{{- fail "workload.flags: has quotes, and no shell reads them; pass a list of words" -}}
{{- end -}}
{{- $flags := include "workload.flags" . | fromYamlArray -}}
{{- range $tier := list "local" "persistent" -}}
{{- $interval := int (index $c (printf "%s_ckpt_interval" $tier)) -}}
{{- $folder := index $c (printf "%s_ckpt_dir" $tier) -}}
{{- if and $folder (lt $interval 1) -}}
{{- fail (printf "workload.checkpointing.%s_ckpt_dir: does nothing without %s_ckpt_interval" $tier $tier) -}}
{{- end -}}
{{- if and (gt $interval 0) (not $folder) (or (eq $tier "persistent") (not (include "workload.localDir" $))) -}}
{{- fail (printf "workload.checkpointing.%s_ckpt_interval: needs %s_ckpt_dir" $tier $tier) -}}
{{- end -}}
{{- range $flags -}}
{{- if and (gt $interval 0) (hasPrefix (printf "--%s-ckpt-" $tier) .) -}}
{{- fail (printf "workload.flags: has %s, and workload.checkpointing sets it, too; keep one" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $i.use_supervisor -}}
{{- range $key := list "max_in_job_restarts" "max_workload_restarts" -}}
{{- if hasKey $i $key -}}
{{- fail (printf "infrastructure.%s: the supervisor decides that; set %s in the values of its chart" $key $key) -}}
{{- end -}}
{{- end -}}
{{- if not $i.supervisor_address -}}
{{- fail "infrastructure.supervisor_address: name all addresses, as https://supervisor-0.resiliency-system:7600, or set use_supervisor=false" -}}
{{- end -}}
{{- else if gt (int (include "workload.spares" .)) 0 -}}
{{- fail "workload.spares: nobody gives them ranks with infrastructure.use_supervisor=false" -}}
{{- end -}}
{{- if and $i.gcsfuse_bucket (not $i.enable_gcsfuse) -}}
{{- fail "infrastructure.gcsfuse_bucket: is not mounted without infrastructure.enable_gcsfuse=true" -}}
{{- end -}}
{{- if and $i.enable_gcsfuse (not $i.gcsfuse_bucket) (not $i.pvc) -}}
{{- fail "infrastructure.enable_gcsfuse: name the bucket in infrastructure.gcsfuse_bucket, or a claim of the gcs-fuse chart in infrastructure.pvc" -}}
{{- end -}}
{{- if and (not .Values.networkPolicy.restrictEgress) .Values.networkPolicy.egress -}}
{{- fail "networkPolicy.egress: does nothing without networkPolicy.restrictEgress=true" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled $w.hostNetwork -}}
{{- fail "networkPolicy.enabled: does not hold for pods with workload.hostNetwork=true; set it to false, and let the firewall keep others from torch's ports" -}}
{{- end -}}
{{- end }}
