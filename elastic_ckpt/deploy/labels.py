"""Labels and annotations of the JobSet and its pods; Kueue's queue; pull secrets."""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.deploy import addition, names, settings

# The label of Kueue's guide "Run A JobSet" (API v1beta1).
QUEUE = "kueue.x-k8s.io/queue-name"


def addition_for(config: schema.Config) -> addition.Addition:
    """The labels and further fields of each pod."""
    section = config.pods
    secrets = settings.names("pod_image_pull_secrets", section.pod_image_pull_secrets)
    for secret in secrets:
        names.check_name("pod_image_pull_secrets", secret, dots=True)
    spec: addition.Object = {}
    container: addition.Object = {}
    if section.pod_security_context:
        spec["securityContext"] = settings.mapping(
            "pod_security_context", section.pod_security_context
        )
    if section.program_security_context:
        container["securityContext"] = settings.mapping(
            "program_security_context", section.program_security_context
        )
    if secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in secrets]
    if section.host_network:
        # With the node's network a pod would resolve names as the node does.
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return addition.Addition(
        labels=settings.mapping("pod_labels", section.pod_labels),
        annotations=settings.mapping("pod_annotations", section.pod_annotations),
        spec=spec,
        container=container,
    )


def jobset_fields(config: schema.Config) -> addition.Object:
    """The metadata and the fields that the configuration adds to the JobSet."""
    deploy, section = config.deploy, config.pods
    labels = settings.mapping("pod_labels", section.pod_labels)
    annotations = settings.mapping("pod_annotations", section.pod_annotations)
    spec: addition.Object = {}
    if deploy.kueue_queue:
        names.check_name("kueue_queue", deploy.kueue_queue)
        labels[QUEUE] = deploy.kueue_queue
        # Kueue resumes it when the queue has room for all of its pods.
        spec["suspend"] = True
    if deploy.ttl_seconds_after_finished >= 0:
        spec["ttlSecondsAfterFinished"] = deploy.ttl_seconds_after_finished
    metadata: addition.Object = {}
    if labels:
        metadata["labels"] = labels
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}
