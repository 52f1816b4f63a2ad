"""Who may do what in a release: certificates, roles, keys, and which pods can talk to which."""

import itertools

import pytest
from rendered_chart import all_pods, by_name, component_of, of_kind, programs, secrets_of, settings_of, template

from octavo.net.security.roles import PeerRole, roles_in
from octavo.wire.tls import WORKER_NAME


def test_a_release_is_insecure_only_where_its_values_say_so(profile):
    """Programs refuse to listen for others without TLS, unless they are told that they may."""
    objects = by_name(template(profile=profile))
    for component, pod, container in programs(objects):
        read = settings_of(component, container)
        assert read.insecure == (profile in ("cpu", "models"))
        assert all((read.tls_cert, read.tls_key, read.tls_ca)) == (not read.insecure)
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        if not read.insecure:
            assert {f"{mounted['tls']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")} == {
                *(read.tls_cert, read.tls_key, read.tls_ca)
            }
            (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
            assert volume["secret"]["secretName"].endswith((component, f"{component}-tls"))


def test_certificates_have_the_roles_and_names_that_the_code_expects():
    certificates = {name: each["spec"] for name, each in of_kind(by_name(template()), "Certificate").items()}
    roles = {name: roles_in(spec.get("uris", ())) for name, spec in certificates.items()}
    assert roles == {
        "trial-octavo-ca": frozenset(),
        "trial-octavo-store-tls": frozenset(),
        **{f"trial-octavo-{role}-tls": {role} for role in PeerRole},
    }
    assert WORKER_NAME in certificates["trial-octavo-worker-tls"]["dnsNames"]
    for role in ("router", "worker"):  # both call workers
        assert {"server auth", "client auth"} <= set(certificates[f"trial-octavo-{role}-tls"]["usages"])
    for role in ("client", "operator"):
        assert "dnsNames" not in certificates[f"trial-octavo-{role}-tls"]
    for spec in certificates.values():
        assert spec["issuerRef"]["name"] == ("trial-octavo-root" if spec.get("isCA") else "trial-octavo-ca")


def test_names_of_services_stand_in_the_certificates_of_who_answers_there(profile):
    objects = by_name(template("--namespace", "ns", profile=profile))
    certificates = of_kind(objects, "Certificate")
    if not certificates:
        assert profile in ("cpu", "cells", "models")
        return
    for name, service in of_kind(objects, "Service").items():
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        if component != "worker":  # callers of workers expect one name of all
            names = certificates[f"trial-octavo-{component}-tls"]["spec"]["dnsNames"]
            assert {name, f"{name}.ns", f"{name}.ns.svc", f"{name}.ns.svc.cluster.local"} <= set(names)
    for route in of_kind(objects, "GRPCRoute").values():
        assert set(route["spec"]["hostnames"]) <= set(certificates["trial-octavo-router-tls"]["spec"]["dnsNames"])


def test_every_secret_that_a_pod_needs_is_made_or_named_in_the_values(profile):
    given = {
        "external-store": {"octavo-store", "octavo-store-tls"},
        "secure": {"octavo-api-keys", "octavo-test-key"},
        "cells": {"octavo-router", "octavo-worker", "octavo-client", "store-a", "store-b", "store-c"},
    }
    objects = by_name(template(profile=profile))
    made = {*of_kind(objects, "Secret")}
    made |= {each["spec"]["secretName"] for each in of_kind(objects, "Certificate").values()}
    needed = set()
    for pod in all_pods(objects).values():
        volumes = pod["spec"].get("volumes", ())
        needed |= {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
        for container in pod["spec"]["containers"]:
            needed |= {name for name, _ in secrets_of(container).values()}
    assert needed - made == given.get(profile, set())


# Which pods can talk to which


def selects(peer, namespace, labels):
    """Whether a peer of a policy in the namespace `ns` means a pod. Addresses mean no pod here."""
    if "ipBlock" in peer:
        return False
    names = peer.get("namespaceSelector", {}).get("matchLabels")
    in_namespace = (
        namespace == "ns"
        if "namespaceSelector" not in peer
        else names in (None, {"kubernetes.io/metadata.name": namespace})
    )
    return in_namespace and peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items()


def rule_allows(rule, side, namespace, labels, port):
    ports = [each["port"] for each in rule.get("ports", ())]
    return (not ports or port in ports) and (
        side not in rule or any(selects(peer, namespace, labels) for peer in rule[side])
    )


def passes(policies, source, target, port):
    """Whether a connection is allowed where it begins and where it ends. A pod is its namespace and labels."""
    for here, there, direction, side in ((source, target, "Egress", "to"), (target, source, "Ingress", "from")):
        chosen = [
            policy["spec"]
            for policy in policies
            if here[0] == "ns"
            and direction in policy["spec"]["policyTypes"]
            and policy["spec"]["podSelector"]["matchLabels"].items() <= here[1].items()
        ]
        rules = [rule for spec in chosen for rule in spec.get(direction.lower(), ())]
        if chosen and not any(rule_allows(rule, side, *there, port) for rule in rules):
            return False
    return True


PORTS = {"router": (50051, 58051, 52051, 51051), "worker": (50061, 52061, 34567), "store": (6379,), "test": ()}
ALLOWED = {
    *itertools.product(["app", "test"], ["router"], [50051, 58051]),
    ("prometheus", "router", 52051),
    ("prometheus", "worker", 52061),
    ("router", "worker", 50061),
    *itertools.product(["worker"], ["worker"], [50061, 52061, 34567]),
    *itertools.product(["router", "worker", "store"], ["store"], [6379]),
}


def test_pods_reach_what_they_need_and_nothing_else():
    objects = by_name(template("--namespace", "ns"))
    policies = list(of_kind(objects, "NetworkPolicy").values())
    here = {component_of(pod): ("ns", pod["metadata"]["labels"]) for pod in all_pods(objects).values()}
    others = {"app": ("ns", {"app": "mine"}), "prometheus": ("monitoring", {}), "stranger": ("elsewhere", {})}
    pairs = [(name, target, port) for name in (*here, *others) for target in here for port in PORTS[target]]
    reached = {(name, t, port) for name, t, port in pairs if passes(policies, (here | others)[name], here[t], port)}
    assert reached == ALLOWED - {("test", "router", 58051)}
    outside = ("elsewhere", {})
    assert [name for name in here if passes(policies, here[name], outside, 443)] == []
    for port in (53, 5353):  # on OpenShift pods of the cluster's DNS listen on the second one
        assert all(passes(policies, here[name], outside, port) for name in here)


def test_cells_do_not_reach_each_other():
    cells = "cells[0].name=a,cells[1].name=b"
    objects = by_name(template("--namespace", "ns", "--set", cells))
    policies = list(of_kind(objects, "NetworkPolicy").values())
    found = [("ns", pod["metadata"]["labels"]) for pod in all_pods(objects).values()]
    reached = {
        (source[1]["octavo/cell"] == target[1]["octavo/cell"], component)
        for source, target in itertools.product(found, found)
        for component in (target[1]["app.kubernetes.io/component"],)
        for port in PORTS[component]
        if source[1]["app.kubernetes.io/component"] != "test" and passes(policies, source, target, port)
    }
    assert reached == {(True, "worker"), (True, "store")}


def test_a_store_of_ones_own_is_reached_where_it_is():
    objects = by_name(template("--namespace", "ns", profile="external-store"))
    policies = list(of_kind(objects, "NetworkPolicy").values())
    for component in ("router", "worker"):
        pods = [pod for pod in all_pods(objects).values() if component_of(pod) == component]
        source = ("ns", pods[0]["metadata"]["labels"])
        assert passes(policies, source, ("redis", {}), 6380)
        assert not passes(policies, source, ("redis", {}), 6379)
        assert not passes(policies, source, ("elsewhere", {}), 6380)


@pytest.mark.parametrize("cell", ["", "-b"])
def test_a_gateway_knows_routers_by_a_name_in_their_certificate(cell):
    options = ["--set=cells[0].name=a,cells[1].name=b"] if cell else []
    objects = by_name(template(*options, "--namespace", "ns", profile="secure"))
    policy = objects["BackendTLSPolicy", f"trial-octavo{cell}"]["spec"]
    assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": f"trial-octavo{cell}"}]
    certificate = objects["Certificate", f"trial-octavo{cell}-router-tls"]["spec"]
    assert policy["validation"]["hostname"] in certificate["dnsNames"]
    assert policy["validation"]["caCertificateRefs"] == [{"group": "", "kind": "ConfigMap", "name": "octavo-ca"}]
    options += ["--set=grpcRoute.backendTls.caCertificateRefs=null"]
    policy = by_name(template(*options, profile="secure"))["BackendTLSPolicy", f"trial-octavo{cell}"]["spec"]
    assert policy["validation"]["caCertificateRefs"] == [
        {"group": "", "kind": "Secret", "name": certificate["secretName"]}
    ]
