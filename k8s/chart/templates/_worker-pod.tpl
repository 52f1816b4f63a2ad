{{- /* The pod of a worker, or of one host of a worker's group. Arguments: root; component; worker, its values; follows, whether it is a
host other than that of the front, which routers, probes and operators do not call. */ -}}
{{- define "octavo.worker-pod" -}}
{{- $component := .component -}}
{{- $worker := .worker -}}
{{- $follows := .follows -}}
{{- with .root -}}
metadata:
  labels:
    {{- include "octavo.labels" $component | nindent 4 }}
    {{- with $worker.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    octavo/store: {{ include "octavo.storeUrl" . | sha256sum | trunc 16 | quote }}
    {{- with $worker.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "octavo.podSecurity" . | nindent 2 }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # What the drain takes, and some seconds to end in. A follower ends with its front, which it asks to drain.
  terminationGracePeriodSeconds: {{ add $worker.drainSeconds 15 }}
  {{- include "octavo.spread" (dict "root" . "selector" (include "octavo.selector" $component)) | nindent 2 }}
  {{- $folders := list }}
  {{- if or .Values.model.volume (include "octavo.hasDownload" .Values.model) }}
  {{- $folders = list (dict "name" "model" "model" .Values.model) }}
  {{- end }}
  {{- include "octavo.initContainers" (dict "root" . "component" "worker" "image" $worker.image "given" $worker.initContainers "folders" $folders) | nindent 2 }}
  containers:
    - name: worker
      image: {{ include "octavo.image" (dict "root" . "image" $worker.image) }}
      imagePullPolicy: {{ $worker.image.pullPolicy }}
      args: ["--model", {{ include "octavo.modelPath" .Values.model | quote }}, "--device", {{ $worker.device | quote }}]
      env:
        # The pod's name: a pod that takes the place of another one is the same worker.
        - name: OCTAVO_WORKER_ID
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        # The pod's address: names are cached for half a minute, and a pod that takes the place has another address.
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: OCTAVO_WORKER_ADVERTISE, value: {{ eq .Values.ipFamily "IPv6" | ternary "[$(POD_IP)]" "$(POD_IP)" | quote }}}
        {{- include "octavo.storeEnv" (dict "root" . "program" "WORKER") | nindent 8 }}
        {{- with .Values.model.name | default .Values.model.download.hub }}
        - {name: OCTAVO_WORKER_MODEL_NAME, value: {{ . | quote }}}
        {{- end }}
        # By variables and not by arguments: preStop reads them, too.
        - {name: OCTAVO_WORKER_HOST, value: {{ include "octavo.host" . }}}
        - {name: OCTAVO_WORKER_WEB_LISTEN, value: {{ include "octavo.webListen" (dict "root" . "port" 52061) }}}
        - {name: OCTAVO_WORKER_ROLE, value: {{ $worker.role }}}
        - {name: OCTAVO_WORKER_LOG_FORMAT, value: json}
        - {name: OCTAVO_WORKER_DRAIN_MS, value: {{ mul 1000 $worker.drainSeconds | int64 | toString | quote }}}
        {{- with .Values.store.waitForReplicas }}
        - {name: OCTAVO_WORKER_STORE_REPLICAS, value: {{ . | int64 | toString | quote }}}
        {{- end }}
        {{- include "octavo.tlsEnv" (dict "root" . "program" "WORKER") | nindent 8 }}
        {{- if gt (int $worker.group.size) 1 }}
        # How the hosts of a group find each other, in the words of torchrun. The controller sets LWS_… before all others.
        - {name: OCTAVO_WORKER_LAUNCHER, value: torchrun}
        - {name: MASTER_ADDR, value: $(LWS_LEADER_ADDRESS)}
        - {name: MASTER_PORT, value: "29500"}
        - {name: RANK, value: $(LWS_WORKER_INDEX)}
        - {name: WORLD_SIZE, value: $(LWS_GROUP_SIZE)}
        {{- if not (or (hasKey $worker.settings "tensor_parallel") (hasKey $worker.settings "pipeline_parallel")) }}
        - {name: OCTAVO_WORKER_TENSOR_PARALLEL, value: {{ $worker.group.size | int64 | toString | quote }}}
        {{- end }}
        {{- end }}
        {{- include "octavo.furtherEnv" (dict "component" "worker" "env" $worker.env) | nindent 8 }}
        {{- include "octavo.settings" (dict "program" "WORKER" "settings" $worker.settings) | nindent 8 }}
        {{- if and (not $worker.cache.persistent) (not (hasKey $worker.settings "packed_cache")) }}
        # The pod's own folder goes with the pod, and what is written into it counts against its size limit.
        - {name: OCTAVO_WORKER_PACKED_CACHE, value: "off"}
        {{- end }}
        # ~/.cache holds converted and packed weights, and models of the hub.
        - {name: HOME, value: /cache}
      {{- if not $follows }}
      ports:
        - {name: grpc, containerPort: 50061}
        - {name: web, containerPort: 52061}
      # SERVING only once the model is loaded: nothing else is asked before.
      startupProbe:
        {{- include "octavo.probe" (dict "root" . "port" 50061 "service" "octavo.internal.v1.Worker") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $worker.startupSeconds 4) 5 }}
      readinessProbe:
        {{- include "octavo.probe" (dict "root" . "port" 50061 "service" "octavo.internal.v1.Worker") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      # A worker whose steps hang ends by itself; this is for a process that does not even answer.
      livenessProbe:
        {{- include "octavo.probe" (dict "root" . "port" 50061 "service" "alive") | nindent 8 }}
        periodSeconds: 20
        timeoutSeconds: 10
        failureThreshold: 3
      # Its sequences move to other workers before SIGTERM comes, and the process has nothing left to lose.
      lifecycle:
        preStop:
          exec: {command: ["octavo", "drain", "--self", "--grace", {{ $worker.drainSeconds | int64 | toString | quote }}]}
      {{- end }}
      resources:
        {{- $resources := deepCopy $worker.resources }}
        {{- if $worker.gpus }}
        {{- $gpus := dict $worker.gpuResource $worker.gpus }}
        {{- $resources = mergeOverwrite $resources (dict "limits" $gpus "requests" $gpus) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      {{- include "octavo.containerSecurity" . | nindent 6 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /cache}
        {{- include "octavo.modelMounts" (dict "folders" $folders) | nindent 8 }}
        {{- include "octavo.tlsMounts" (dict "root" .) | nindent 8 }}
        {{- with $worker.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
    {{- if not $worker.cache.persistent }}
    - {name: cache, emptyDir: {sizeLimit: {{ $worker.cache.size }}}}
    {{- end }}
    {{- include "octavo.modelVolumes" (dict "folders" $folders) | nindent 4 }}
    {{- include "octavo.tlsVolumes" (dict "root" . "role" "worker") | nindent 4 }}
    {{- with $worker.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "octavo.podValues" (dict "root" . "of" $worker) | nindent 2 }}
{{- end -}}
{{- end -}}

{{- /* Workers of several hosts each. The controller starts the pods of a group together, and all of them anew when one ends.
Arguments: root, component, name, worker. */ -}}
{{- define "octavo.worker-group" -}}
{{- $component := .component -}}
{{- $worker := .worker -}}
{{- $name := .name -}}
{{- if $worker.cache.persistent }}
{{- fail (printf "%s: worker.cache.persistent and worker.group.size above 1 do not go together: a LeaderWorkerSet has no claims of its pods here. Put packed weights on a volume of yours by worker.extraVolumes and settings.packed_cache" $name) }}
{{- end }}
{{- $stages := int (get $worker.settings "pipeline_parallel" | default 1) }}
{{- $ranks := int (get $worker.settings "tensor_parallel" | default (ternary 1 $worker.group.size (gt $stages 1))) }}
{{- if mod (mul $ranks $stages) (int $worker.group.size) }}
{{- fail (printf "%s: settings.tensor_parallel, times settings.pipeline_parallel, has to be a multiple of worker.group.size: each host has equally many ranks" $name) }}
{{- end }}
{{- if and (mod $stages (int $worker.group.size)) (mod (int $worker.group.size) $stages) }}
{{- fail (printf "%s: settings.pipeline_parallel and worker.group.size: the one has to be a multiple of the other" $name) }}
{{- end }}
{{- with .root -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  labels: {{- include "octavo.labels" $component | nindent 4 }}
spec:
  replicas: {{ include "octavo.replicas" (dict "root" . "kind" "LeaderWorkerSet" "name" $name "of" $worker) }}
  # Hosts wait for each other while they start, so none may wait until another one is ready.
  startupPolicy: LeaderCreated
  networkConfig: {subdomainPolicy: Shared}
  leaderWorkerTemplate:
    size: {{ $worker.group.size }}
    # A group without one of its hosts computes nothing: streams are elsewhere by then.
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "octavo.worker-pod" (dict "root" . "component" $component "worker" $worker "follows" false) | nindent 6 }}
    workerTemplate:
      {{- include "octavo.worker-pod" (dict "root" . "component" $component "worker" $worker "follows" true) | nindent 6 }}
{{- end -}}
{{- end -}}
