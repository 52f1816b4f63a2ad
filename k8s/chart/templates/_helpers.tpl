{{- /* The beginning of all names: of a cell's objects, with the cell's name. */ -}}
{{- define "octavo.fullname" -}}
{{- $name := .Values.fullnameOverride | default (contains "octavo" .Release.Name | ternary .Release.Name (printf "%s-octavo" .Release.Name)) -}}
{{- if .cell -}}
{{- printf "%s-%s" ($name | trunc 37 | trimSuffix "-") .cell -}}
{{- else -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* A template for each cell, with the cell's own values in place; without cells, once. Arguments: root, template. */ -}}
{{- define "octavo.eachCell" -}}
{{- $root := .root -}}
{{- $template := .template -}}
{{- if and $root.Values.cells (or $root.Values.store.url $root.Values.store.existingSecret) -}}
{{- fail "store: a cell has a store of its own: give each cell its url or existingSecret, as cells[].store" -}}
{{- end -}}
{{- range $root.Values.cells | default (list dict) -}}
{{- $values := mergeOverwrite (deepCopy (merge dict $root.Values)) (omit . "name") -}}
{{- $context := dict "Values" $values "Release" $root.Release "Chart" $root.Chart "Capabilities" $root.Capabilities "cell" .name }}
---
{{ include $template $context }}
{{- end -}}
{{- end -}}

{{- /* What clients take as endpoints: the Services of all cells, in their order. */ -}}
{{- define "octavo.endpoints" -}}
{{- $root := . -}}
{{- range $index, $cell := .Values.cells -}}
{{- if $index }};{{ end -}}
{{- include "octavo.fullname" (dict "Values" $root.Values "Release" $root.Release "cell" $cell.name) }}.{{ $root.Release.Namespace }}:{{ $root.Values.router.service.port }}
{{- end -}}
{{- end -}}

{{- /* Labels by which Services and controllers find pods. Arguments: root, component. */ -}}
{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.cell }}
octavo/cell: {{ . }}
{{- end }}
{{- end -}}

{{- /* All labels of an object. Arguments: root, component. */ -}}
{{- define "octavo.labels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* An image. Arguments: root, image. */ -}}
{{- define "octavo.image" -}}
{{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) | quote }}
{{- end -}}

{{- /* On which interface a program listens: on all. */ -}}
{{- define "octavo.host" -}}
{{ eq .Values.ipFamily "IPv6" | ternary "::" "0.0.0.0" | quote }}
{{- end -}}

{{- define "octavo.storeSecret" -}}
{{ .Values.store.existingSecret | default (printf "%s-store" (include "octavo.fullname" .)) }}
{{- end -}}

{{- define "octavo.storeSecretKey" -}}
{{ if .Values.store.existingSecret }}{{ .Values.store.existingSecretKey }}{{ else }}url{{ end }}
{{- end -}}

{{- define "octavo.hasBundledStore" -}}
{{ if not (or .Values.store.existingSecret .Values.store.url) }}true{{ end }}
{{- end -}}

{{- /* What every pod may do: nothing beyond its own files. */ -}}
{{- define "octavo.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "octavo.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Settings of a program as environment variables. Arguments: prefix, settings. */ -}}
{{- define "octavo.settings" -}}
{{- range $name, $value := .settings }}
- name: {{ printf "OCTAVO_%s_%s" $.program (trimPrefix (printf "%s_" (lower $.program)) $name | upper) }}
  value: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ int64 $value | toString | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end -}}

{{- /* Milliseconds that a program may take to leave: what Kubernetes grants, less preStop, less 5 s to end in. */ -}}
{{- define "octavo.drainMs" -}}
{{- mul 1000 (max 0 (sub (sub .grace .preStop) 5)) | toString | quote }}
{{- end -}}

{{- define "octavo.modelMount" -}}
{{- if .Values.model.volume }}
- {name: model, mountPath: {{ .Values.model.mountPath | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "octavo.modelVolume" -}}
{{- with .Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
