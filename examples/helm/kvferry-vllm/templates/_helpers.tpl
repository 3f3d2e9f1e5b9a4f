{{/* The kv_transfer_config of a server: vLLM's JSON. */}}
{{- define "kvferry.transferConfig" -}}
{{- $kvRole := dict "prefill" "kv_producer" "decode" "kv_consumer" -}}
{{- $extra := dict
  "host" "$(POD_IP)"
  "transport" .values.transport
  "cluster_key_file" "/etc/kvferry/cluster.key"
  "curve_keys" "/etc/kvferry/curve.json" -}}
{{- $config := dict
  "kv_connector" "KVFerryConnector"
  "kv_connector_module_path" "kvferry.integrations.vllm"
  "kv_role" (index $kvRole .role)
  "engine_id" "$(POD_NAME)"
  "kv_port" (int .own.controlPort)
  "kv_connector_extra_config" (mustMergeOverwrite $extra (.own.extraConfig | default dict)) -}}
{{- with .own.loadFailurePolicy -}}
{{- $_ := set $config "kv_load_failure_policy" . -}}
{{- end -}}
{{- mustToJson $config -}}
{{- end -}}

{{/* Where the pods run, and who may pull their image. */}}
{{- define "kvferry.placement" -}}
{{- with .values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
