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

{{- /* Refuses a list whose items have one name twice: their objects would have it, too. Arguments: of, items. */ -}}
{{- define "octavo.namesDiffer" -}}
{{- $seen := dict -}}
{{- range .items -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "%s: two have the name %s" $.of .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
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
{{- include "octavo.namesDiffer" (dict "of" "cells" "items" $root.Values.cells) -}}
{{- range $root.Values.cells | default (list dict) -}}
{{- $values := mergeOverwrite (deepCopy (merge dict $root.Values)) (omit . "name") -}}
{{- $context := dict "Values" $values "Release" $root.Release "Chart" $root.Chart "Capabilities" $root.Capabilities "Files" $root.Files "cell" .name "script" $script }}
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

{{- /* A template for each model, with the model's own values in place; without `models`, once. Arguments: root, template. */ -}}
{{- define "octavo.eachModel" -}}
{{- $root := .root -}}
{{- $template := .template -}}
{{- include "octavo.namesDiffer" (dict "of" "models" "items" $root.Values.models) -}}
{{- $served := list -}}
{{- range $root.Values.models -}}
{{- $served = append $served (dict "name" (include "octavo.nameOfModel" .)) -}}
{{- end -}}
{{- include "octavo.namesDiffer" (dict "of" "models" "items" $served) -}}
{{- range $root.Values.models | default (list dict) -}}
{{- $values := mergeOverwrite (deepCopy (merge dict $root.Values)) (dict "model" (.model | default dict) "worker" (.worker | default dict)) -}}
{{- if .name -}}
{{- $_ := set $values.model "name" (include "octavo.nameOfModel" .) -}}
{{- end }}
{{ include $template (dict "Values" $values "Release" $root.Release "Chart" $root.Chart "Capabilities" $root.Capabilities "Files" $root.Files "cell" $root.cell "model" .name) }}
{{- end -}}
{{- end -}}

{{- /* The name by which requests ask for a model. The argument is an item of `models`. */ -}}
{{- define "octavo.nameOfModel" -}}
{{ dig "model" "name" "" . | default .name }}
{{- end -}}

{{- /* Labels by which Services and controllers find pods. Arguments: root, component, pool. */ -}}
{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.cell }}
octavo/cell: {{ . }}
{{- end }}
{{- if eq .component "worker" }}
{{- with .root.model }}
octavo/model: {{ . }}
{{- end }}
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

{{- /* An image, by its digest if there is one. Arguments: root, image. */ -}}
{{- define "octavo.image" -}}
{{- if .image.digest -}}
{{ printf "%s@%s" .image.repository .image.digest | quote }}
{{- else -}}
{{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) | quote }}
{{- end -}}
{{- end -}}

{{- /* How many pods: with autoscaling as many as the cluster has, since a number of one's own, or none, would set them back at each
upgrade. None of a kind that should have some were stopped by hand, and no HorizontalPodAutoscaler starts them. At first it is `replicas` within the bounds. Arguments: root, kind, name, of (values with replicas and autoscaling). */ -}}
{{- define "octavo.replicas" -}}
{{- if and .of.autoscaling.enabled (gt (int .of.autoscaling.minReplicas) (int .of.autoscaling.maxReplicas)) -}}
{{- fail (printf "%s: autoscaling.minReplicas is above autoscaling.maxReplicas" .name) -}}
{{- end -}}
{{- $there := .of.autoscaling.enabled | ternary (lookup (eq .kind "LeaderWorkerSet" | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1") .kind .root.Release.Namespace .name) dict -}}
{{- if $there -}}
{{ max (dig "spec" "replicas" 1 $there) .of.autoscaling.minReplicas }}
{{- else if .of.autoscaling.enabled -}}
{{ max (min .of.replicas .of.autoscaling.maxReplicas) .of.autoscaling.minReplicas }}
{{- else -}}
{{ .of.replicas }}
{{- end -}}
{{- end -}}

{{- /* What an annotation says of a StatefulSet's claim, which Kubernetes never changes: an upgrade that would is refused here, before
anything has changed, and with the remedy. Arguments: root, name, claim (text). */ -}}
{{- define "octavo.claim" -}}
{{- $there := lookup "apps/v1" "StatefulSet" .root.Release.Namespace .name -}}
{{- $before := dig "metadata" "annotations" "octavo/claim" .claim ($there | default dict) -}}
{{- if ne $before .claim -}}
{{- fail (printf "StatefulSet %s has the claim %q, and these values ask for %q: Kubernetes does not change it. Run `kubectl --namespace %s delete statefulset %s --cascade=orphan`, which leaves pods and volumes as they are, and upgrade again; docs/deployment.md has the rest (Changing volumes)" .name $before .claim .root.Release.Namespace .name) -}}
{{- end -}}
octavo/claim: {{ .claim | quote }}
{{- end -}}

{{- /* The name of a StatefulSet of workers. A pod's name, which is longer, has to be a label. Arguments: root, pool. */ -}}
{{- define "octavo.workerName" -}}
{{- $name := join "-" (compact (list (include "octavo.fullname" .root) "worker" .root.model .pool)) -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "%s is longer than 52 letters, which Kubernetes takes: give a shorter fullnameOverride" $name) -}}
{{- end -}}
{{ $name }}
{{- end -}}

{{- /* What is the same in the pods of routers and of workers. Arguments: root, of (values of router or worker). */ -}}
{{- define "octavo.podValues" -}}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* All models of a release or cell as they are mounted, each folder once: a list of mountPath, volume and download, with a name. */ -}}
{{- define "octavo.modelFolders" -}}
{{- $folders := list -}}
{{- $seen := dict -}}
{{- $root := . -}}
{{- range .Values.models | default (list dict) -}}
{{- $model := mergeOverwrite (deepCopy $root.Values.model) (.model | default dict) -}}
{{- if or $model.volume (include "octavo.hasDownload" $model) -}}
{{- $there := get $seen $model.mountPath -}}
{{- if and $there (ne $there (toJson (list $model.volume $model.download))) -}}
{{- fail (printf "models: two have different volumes or downloads at %s: give each a mountPath of its own" $model.mountPath) -}}
{{- else if not $there -}}
{{- $_ := set $seen $model.mountPath (toJson (list $model.volume $model.download)) -}}
{{- $folders = append $folders (dict "name" (.name | default "" | printf "model-%s" | trimSuffix "-") "model" $model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $folders -}}
{{- end -}}

{{- /* Whether files are fetched when a pod starts. The argument is a model's values. */ -}}
{{- define "octavo.hasDownload" -}}
{{- if and .download.hub .download.command -}}
{{- fail "model.download: give hub, or a command of an image of yours, and not both" -}}
{{- end -}}
{{- if or .download.hub .download.command }}true{{ end -}}
{{- end -}}

{{- /* Where a worker finds its model. The argument is a model's values. */ -}}
{{- define "octavo.modelPath" -}}
{{ .download.hub | empty | ternary .path .mountPath }}
{{- end -}}

{{- /* Init containers: those that fetch models, then those of the values. A folder that has been filled is left as it is.
Arguments: root, component, image, given, folders. */ -}}
{{- define "octavo.initContainers" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- $image := .image -}}
{{- $found := list -}}
{{- range .folders -}}
{{- if include "octavo.hasDownload" .model -}}
{{- $found = append $found . -}}
{{- end -}}
{{- end -}}
{{- if or $found .given }}
initContainers:
  {{- range $found }}
  {{- $download := .model.download }}
  - name: download{{ trimPrefix "model" .name }}
    {{- $from := or (not (empty $download.hub)) (empty $download.image.repository) | ternary $image $download.image }}
    image: {{ include "octavo.image" (dict "root" $root "image" $from) }}
    imagePullPolicy: {{ $from.pullPolicy }}
    {{- if $download.hub }}
    command: ["python", "-c", {{ $root.Files.Get "files/download.py" | toJson }}]
    {{- else }}
    command: {{- toYaml $download.command | nindent 6 }}
    {{- end }}
    env:
      - {name: MODEL_FOLDER, value: {{ .model.mountPath | quote }}}
      # Routers read the tokenizer alone.
      - {name: MODEL_FOR, value: {{ $component }}}
      - {name: MODEL_HUB_NAME, value: {{ $download.hub | quote }}}
      - {name: HOME, value: /tmp}
      {{- range $download.env }}
      - {{ toJson . }}
      {{- end }}
    resources: {{- toYaml $download.resources | nindent 6 }}
    {{- include "octavo.containerSecurity" $root | nindent 4 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: {{ .name }}, mountPath: {{ .model.mountPath | quote }}}
  {{- end }}
  {{- with .given }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Arguments: folders. */ -}}
{{- define "octavo.modelMounts" -}}
{{- range .folders }}
- {name: {{ .name }}, mountPath: {{ .model.mountPath | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Arguments: folders. */ -}}
{{- define "octavo.modelVolumes" -}}
{{- range .folders }}
- name: {{ .name }}
  {{- toYaml (.model.volume | default (dict "emptyDir" (dict "sizeLimit" .model.download.size))) | nindent 2 }}
{{- end }}
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
{{- if or .Values.serviceAccount.create .Values.serviceAccount.name }}
serviceAccountName: {{ include "octavo.serviceAccount" . }}
{{- end }}
{{- $context := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if .Values.fixedIds -}}
{{- $context = merge $context (dict "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532) -}}
{{- end }}
securityContext: {{- toYaml (mergeOverwrite $context (deepCopy .Values.podSecurityContext)) | nindent 2 }}
{{- end -}}

{{- define "octavo.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "octavo.basename" .) }}
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
