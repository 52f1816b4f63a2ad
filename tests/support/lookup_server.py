"""As much of Kubernetes' API as Helm asks when a template looks up an object: groups, kinds, objects by their names."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KINDS = {
    "v1": ("Secret", "Service", "ServiceAccount", "ConfigMap", "Pod"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy", "Ingress"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "keda.sh/v1alpha1": ("ScaledObject",),
}


def root_of(version):
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def plural_of(kind):
    return kind.lower().removesuffix("y") + "ies" if kind.endswith("y") else f"{kind.lower()}s"


def group_of(version):
    known = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [known], "preferredVersion": known}


def answers_for(objects):
    """What is answered, by path."""
    groups = [group_of(version) for version in KINDS if "/" in version]
    found = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version, kinds in KINDS.items():
        resources = [
            {"name": plural_of(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
            for kind in kinds
        ]
        found[root_of(version)] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    for each in objects:
        name, namespace = each["metadata"]["name"], each["metadata"]["namespace"]
        found[f"{root_of(each['apiVersion'])}/namespaces/{namespace}/{plural_of(each['kind'])}/{name}"] = each
    return found


@contextmanager
def lookup_server(objects):
    """Its address, while it answers. What is not there is NotFound, as Kubernetes says it."""
    answers = answers_for(objects)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(answers.get(path, missing)).encode()
            self.send_response(200 if path in answers else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
