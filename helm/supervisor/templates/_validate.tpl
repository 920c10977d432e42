{{- /* Values that contradict each other. What a single value may be is in values.schema.json. */ -}}
{{- define "supervisor.validate" -}}
{{- $v := .Values -}}
{{- range $key, $why := .Files.Get "refused.yaml" | fromYaml -}}
{{- if hasKey $v $key }}{{ fail (printf "%s: %s" $key $why) }}{{ end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) -}}
{{- fail (printf "the name of the release, %s, is no name for a Service: it must begin with a letter and have no dots" .Release.Name) -}}
{{- end -}}
{{- if le (float64 $v.heartbeat_timeout_s) (float64 $v.heartbeat_polling_period_s) -}}
{{- fail (printf "heartbeat_timeout_s: %v is not more than heartbeat_polling_period_s=%v; each host would be taken for lost" $v.heartbeat_timeout_s $v.heartbeat_polling_period_s) -}}
{{- end -}}
{{- $most := $v.max_num_dp_replicas | default $v.num_dp_replicas | int -}}
{{- if lt $most (int $v.num_dp_replicas) -}}
{{- fail (printf "max_num_dp_replicas: %d is less than num_dp_replicas=%v" $most $v.num_dp_replicas) -}}
{{- end -}}
{{- if hasKey $v "min_num_dp_replicas" -}}
{{- if gt (int $v.min_num_dp_replicas) $most -}}
{{- fail (printf "min_num_dp_replicas: %v is more than num_dp_replicas=%d" $v.min_num_dp_replicas $most) -}}
{{- end -}}
{{- if and (not $v.enable_workload_scaling) (ne (int $v.min_num_dp_replicas) $most) -}}
{{- fail (printf "min_num_dp_replicas: %v is never reached with enable_workload_scaling: false" $v.min_num_dp_replicas) -}}
{{- end -}}
{{- end -}}
{{- if and (not $v.enable_workload_scaling) (gt $most (int $v.num_dp_replicas)) -}}
{{- fail (printf "max_num_dp_replicas: %d is never reached with enable_workload_scaling: false" $most) -}}
{{- end -}}
{{- if and (not $v.enable_workload_scaling) $v.scale_up -}}
{{- fail "scale_up: true contradicts enable_workload_scaling: false; keep one" -}}
{{- end -}}
{{- if and (hasKey $v "fault_injection_period_s") (not $v.enable_fault_injection) -}}
{{- fail "fault_injection_period_s: does nothing without enable_fault_injection: true" -}}
{{- end -}}
{{- if and $v.job_namespace (ne $v.workload_namespace "default") (ne $v.job_namespace $v.workload_namespace) -}}
{{- fail (printf "job_namespace: %s and workload_namespace=%s are two names of one thing, and differ; keep one" $v.job_namespace $v.workload_namespace) -}}
{{- end -}}
{{- range $key := list "replicated_job_name" "workload_container_name" -}}
{{- $name := index $v $key | default "host" -}}
{{- if ne $name "host" }}{{ fail (printf "%s: %s is not what the workload chart makes; its job and container are named host. Leave it out" $key $name) }}{{ end -}}
{{- end -}}
{{- if and $v.tls.existingSecret (or $v.tls.dnsNames $v.tls.ipAddresses) -}}
{{- fail "tls.dnsNames, tls.ipAddresses: belong to the certificate that the chart makes, and tls.existingSecret names another" -}}
{{- end -}}
{{- if and $v.tls.ca (not $v.tls.existingSecret) -}}
{{- fail "tls.ca: belongs to tls.existingSecret, which is not set; the chart makes an authority of its own" -}}
{{- end -}}
{{- if and $v.policy (not (regexMatch (printf "(?m)^class %s\\b" $v.policy_class) $v.policy)) -}}
{{- fail (printf "policy: has no class %s; define it, or name yours with policy_class" $v.policy_class) -}}
{{- end -}}
{{- end }}
