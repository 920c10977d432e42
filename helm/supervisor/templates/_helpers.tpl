{{- define "supervisor.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "supervisor.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "supervisor.selector" . }}
{{- end }}

{{- define "supervisor.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "supervisor.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "supervisor.port" -}}
{{ regexFind "[0-9]+$" .Values.listen }}
{{- end }}

{{- /* The addresses of all replicas, with commas between. */ -}}
{{- define "supervisor.urls" -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.replicaCount) -}}
{{- $urls = append $urls (printf "https://%s-%d.%s:%s" (include "supervisor.fullname" $) $i $.Release.Namespace (include "supervisor.port" $)) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end }}

{{- define "supervisor.tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "supervisor.fullname" .)) }}
{{- end }}

{{- define "supervisor.operatorSecret" -}}
{{ .Values.operatorToken.existingSecret | default (printf "%s-operator" (include "supervisor.fullname" .)) }}
{{- end }}

{{- /* "true" where there is a ConfigMap with the authority's certificate. */ -}}
{{- define "supervisor.hasCa" -}}
{{ if or (not .Values.tls.existingSecret) .Values.tls.ca }}true{{ end }}
{{- end }}

{{- define "supervisor.workloadNamespace" -}}
{{ .Values.job_namespace | default .Values.workload_namespace }}
{{- end }}

{{- /* supervisor.yaml. Whatever is no key of the chart itself is a setting, with its own name. */ -}}
{{- define "supervisor.settings" -}}
{{- $chart := list "workload_name" "workload_namespace" "job_namespace" "policy" "policy_class" "block_label" "node_quarantine_s" "renewJobSet" "image" "imagePullSecrets" "replicaCount" "listen" "resources" "nodeSelector" "tolerations" "affinity" "priorityClassName" "podAnnotations" "volumes" "volumeMounts" "tls" "operatorToken" "networkPolicy" "podDisruptionBudget" "serviceMonitor" "prometheusRule" "host_daemon" "watchdogs" "useA3high" "replicated_job_name" "workload_container_name" "global" -}}
{{- $settings := dict -}}
{{- range $key, $value := .Values -}}
{{- if and (not (has $key $chart)) (not (kindIs "invalid" $value)) -}}
{{- $_ := set $settings $key $value -}}
{{- end -}}
{{- end -}}
cluster: kubernetes
kubernetes:
  workload_namespace: {{ include "supervisor.workloadNamespace" . }}
  lease: {{ include "supervisor.fullname" . }}
  audience: resiliency-supervisor
  watchdog_account: {{ include "supervisor.fullname" . }}-node
  block_label: {{ .Values.block_label | quote }}
  quarantine_s: {{ .Values.node_quarantine_s | toYaml }}
workload:
  name: {{ .Values.workload_name | quote }}
state: /var/lib/resiliency/supervisor.db
operator_token: /etc/resiliency/operator/token
tls:
  cert: /etc/resiliency/tls/tls.crt
  key: /etc/resiliency/tls/tls.key
{{- if .Values.policy }}
policy: /etc/resiliency/policy.py:{{ .Values.policy_class }}
{{- end }}
{{ toYaml $settings }}
{{- end }}

{{- /* What both pods of `helm test` have. They run where the supervisors do. */ -}}
{{- define "supervisor.testPod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{- define "supervisor.testContainer" -}}
image: {{ include "supervisor.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}
