{{- /* The beginning of the names of objects that a release has once. */ -}}
{{- define "octavo.basename" -}}
{{- .Values.fullnameOverride | default (contains "octavo" .Release.Name | ternary .Release.Name (printf "%s-octavo" .Release.Name)) | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- /* The beginning of all other names: of a cell's objects, with the cell's name. */ -}}
{{- define "octavo.fullname" -}}
{{- if .cell -}}
{{- printf "%s-%s" (include "octavo.basename" . | trunc 37 | trimSuffix "-") .cell -}}
{{- else -}}
{{- include "octavo.basename" . -}}
{{- end -}}
{{- end -}}

{{- /* A template for each cell, with the cell's own values in place; without cells, once. Arguments: root, template, script. */ -}}
{{- define "octavo.eachCell" -}}
{{- $root := .root -}}
{{- $template := .template -}}
{{- $script := .script -}}
{{- if and $root.Values.cells (or $root.Values.store.url $root.Values.store.existingSecret) -}}
{{- fail "store: a cell has a store of its own: give each cell its url or existingSecret, as cells[].store" -}}
{{- end -}}
{{- range $root.Values.cells | default (list dict) -}}
{{- $values := mergeOverwrite (deepCopy (merge dict $root.Values)) (omit . "name") -}}
{{- $context := dict "Values" $values "Release" $root.Release "Chart" $root.Chart "Capabilities" $root.Capabilities "cell" .name "script" $script }}
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

{{- /* Labels by which Services and controllers find pods. Arguments: root, component, pool. */ -}}
{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.cell }}
octavo/cell: {{ . }}
{{- end }}
{{- with .pool }}
octavo/pool: {{ . }}
{{- end }}
{{- end -}}

{{- /* All labels of an object. Arguments: root, component, pool. */ -}}
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

{{- /* Where a pod answers /metrics and /health: on all interfaces, for Prometheus. Arguments: root, port. */ -}}
{{- define "octavo.webListen" -}}
{{ printf "%s:%v" (eq .root.Values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0") .port | quote }}
{{- end -}}

{{- define "octavo.storeSecret" -}}
{{ .Values.store.existingSecret | default (printf "%s-store" (include "octavo.fullname" .)) }}
{{- end -}}

{{- /* The Secret with the bundled store's password. */ -}}
{{- define "octavo.storePasswordSecret" -}}
{{ .Values.store.bundled.passwordSecret | default (printf "%s-store" (include "octavo.fullname" .)) }}
{{- end -}}

{{- /* Further variables of a container, which are no settings. Arguments: component, env. */ -}}
{{- define "octavo.furtherEnv" -}}
{{- range .env }}
{{- if or (hasPrefix "OCTAVO_" .name) (has .name (list "HOME" "POD_IP" "STORE_PASSWORD")) -}}
{{- fail (printf "%s.env: %s is the chart's own: give settings in %s.settings" $.component .name $.component) -}}
{{- end }}
- {{ toJson . }}
{{- end }}
{{- end -}}

{{- /* Where a program finds the store's URL. Of the bundled store it has the password by a variable. Arguments: root, program. */ -}}
{{- define "octavo.storeEnv" -}}
{{- with .root }}
{{- if include "octavo.hasBundledStore" . }}
- name: STORE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "octavo.storePasswordSecret" . }}, key: password}}
- {name: OCTAVO_{{ $.program }}_STORE, value: {{ include "octavo.storeUrl" . | quote }}}
{{- else }}
- name: OCTAVO_{{ $.program }}_STORE
  valueFrom: {secretKeyRef: {name: {{ include "octavo.storeSecret" . }}, key: {{ include "octavo.storeSecretKey" . }}}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "octavo.storeSecretKey" -}}
{{ if .Values.store.existingSecret }}{{ .Values.store.existingSecretKey }}{{ else }}url{{ end }}
{{- end -}}

{{- define "octavo.hasBundledStore" -}}
{{ if not (or .Values.store.existingSecret .Values.store.url) }}true{{ end }}
{{- end -}}

{{- /* The URL of the store: the one that is given, or that of the bundled servers, with a variable for the password. */ -}}
{{- define "octavo.storeUrl" -}}
{{- if .Values.store.url -}}
{{- .Values.store.url -}}
{{- else -}}
{{- $name := printf "%s-store" (include "octavo.fullname" .) -}}
{{- $servers := list (printf "%s:6379" $name) -}}
{{- if .Values.store.bundled.replicas -}}
{{- $servers = list -}}
{{- range $index := until (int (add1 .Values.store.bundled.replicas)) -}}
{{- $servers = append $servers (printf "%s-%d.%s:6379" $name $index $name) -}}
{{- end -}}
{{- end -}}
{{- if .Values.security.insecure -}}
redis://:$(STORE_PASSWORD)@{{ join "," $servers }}/0
{{- else -}}
rediss://:$(STORE_PASSWORD)@{{ join "," $servers }}/0?ssl_ca_certs=/etc/octavo/tls/ca.crt&ssl_certfile=/etc/octavo/tls/tls.crt&ssl_keyfile=/etc/octavo/tls/tls.key
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The Secret with the certificate of a role. Arguments: root, role. Of clients and operators a release has one for all cells. */ -}}
{{- define "octavo.tlsSecret" -}}
{{- $given := get .root.Values.security.secrets .role -}}
{{- $name := has .role (list "client" "operator") | ternary (include "octavo.basename" .root) (include "octavo.fullname" .root) -}}
{{- if $given -}}
{{- $given -}}
{{- else if .root.Values.security.certManager.enabled -}}
{{- printf "%s-%s-tls" $name .role -}}
{{- else -}}
{{- fail (printf "security: there is no certificate of the role %s: turn security.certManager.enabled on, name a Secret in security.secrets.%s, or do without TLS by security.insecure=true" .role .role) -}}
{{- end -}}
{{- end -}}

{{- /* What a program is told of TLS: its files, or in plain words that it does without. Arguments: root, program. */ -}}
{{- define "octavo.tlsEnv" -}}
{{- if .root.Values.security.insecure }}
- {name: OCTAVO_{{ .program }}_INSECURE, value: "true"}
{{- else }}
- {name: OCTAVO_{{ .program }}_TLS_CERT, value: /etc/octavo/tls/tls.crt}
- {name: OCTAVO_{{ .program }}_TLS_KEY, value: /etc/octavo/tls/tls.key}
- {name: OCTAVO_{{ .program }}_TLS_CA, value: /etc/octavo/tls/ca.crt}
{{- end }}
{{- end -}}

{{- /* Where Secrets of certificates are mounted: whole folders, as files that are mounted one by one do not change. Arguments: root. */ -}}
{{- define "octavo.tlsMounts" -}}
{{- if not .root.Values.security.insecure }}
- {name: tls, mountPath: /etc/octavo/tls, readOnly: true}
{{- end }}
{{- if .root.Values.store.tlsSecret }}
- {name: store-tls, mountPath: /etc/octavo/store-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Arguments: root, role. */ -}}
{{- define "octavo.tlsVolumes" -}}
{{- if not .root.Values.security.insecure }}
- {name: tls, secret: {secretName: {{ include "octavo.tlsSecret" . }}, defaultMode: 288}}
{{- end }}
{{- with .root.Values.store.tlsSecret }}
- {name: store-tls, secret: {secretName: {{ . }}, defaultMode: 288}}
{{- end }}
{{- end -}}

{{- /* The Secret with the file of API keys; empty without keys. */ -}}
{{- define "octavo.apiKeySecret" -}}
{{- $keys := .Values.security.apiKeys -}}
{{- if $keys.existingSecret -}}{{ $keys.existingSecret }}{{- else if $keys.lines -}}{{ include "octavo.basename" . }}-api-keys{{- end -}}
{{- end -}}

{{- define "octavo.apiKeyFile" -}}
{{ empty .Values.security.apiKeys.existingSecret | ternary "keys.txt" .Values.security.apiKeys.key }}
{{- end -}}

{{- /* A probe of a gRPC health service. Kubernetes' gRPC probes know no TLS, so with TLS the same is asked over HTTPS, where nobody has to
show a certificate. Arguments: root, port, service. */ -}}
{{- define "octavo.probe" -}}
{{- if .root.Values.security.insecure -}}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- else -}}
httpGet: {port: web, path: /health/{{ .service }}, scheme: HTTPS}
{{- end -}}
{{- end -}}

{{- /* Arguments: root, and what to select. */ -}}
{{- define "octavo.spread" -}}
{{- $root := .root -}}
{{- $selector := .selector -}}
{{- with .root.Values.spread.topologyKeys -}}
topologySpreadConstraints:
{{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $root.Values.spread.whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- $selector | nindent 8 }}
{{- end }}
{{- end }}
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
