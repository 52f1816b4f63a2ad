"""values.yaml and its schema: complete, explained, and each value does what it says."""

import copy
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from rendered_chart import CHART, CLASSES, ROOT, run, same_password, tool

from octavo.settings.options import options_of

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# Settings that the chart decides itself, by variable or argument.
SHARED = {
    *("listen", "host", "web_listen", "store", "store_replicas", "log_format", "drain_ms", "insecure"),
    *("tls_cert", "tls_key", "tls_ca"),
}
WORKER = ("advertise", "worker_id", "model", "model_name", "device", "role", "launcher", "hosts", "host_rank")
DECIDED = {
    "router": SHARED | {"admin_listen", "http_listen", "router_id", "client_certificates", "api_keys"},
    "worker": SHARED | {*WORKER, "meeting_at", "meeting_life", "local_world_size"},
}


def test_the_schema_knows_every_setting_that_the_chart_leaves_open():
    for component, cls in CLASSES.items():
        names = {name for name, option in options_of(cls).items() if not option.hidden}
        assert names >= DECIDED[component]
        named = SCHEMA["properties"][component]["properties"]["settings"]["propertyNames"]["enum"]
        assert set(named) == names - DECIDED[component]


def is_open(schema):
    """Whether the schema leaves to Kubernetes, or to the program, what is inside."""
    return "properties" not in schema


def leaves(schema, path=()):
    """Every value that can be given by itself: its path and its schema."""
    for name, inner in schema["properties"].items():
        if is_open(inner):
            yield (*path, name), inner
        else:
            yield from leaves(inner, (*path, name))


LEAVES = {".".join(path): inner for path, inner in leaves(SCHEMA) if path != ("global",)}


def value_at(values, path):
    for name in path.split("."):
        values = values[name]
    return values


def test_the_schema_has_the_values_and_no_others():
    for path in LEAVES:
        value_at(VALUES, path)

    def compare(values, schema, path):
        assert set(values) == set(schema["properties"]) - {"global"}, path
        assert schema["additionalProperties"] is False
        for name, value in values.items():
            inner = schema["properties"][name]
            if not is_open(inner):
                compare(value, inner, f"{path}{name}.")

    compare(VALUES, SCHEMA, "")


def other_value(schema, default):
    """A value that the schema allows, and that is not the default."""
    if schema.get("examples"):
        return next(each for each in schema["examples"] if each != default)
    if "enum" in schema:
        return next(each for each in schema["enum"] if each != default)
    if schema["type"] == "boolean":
        return not default
    assert schema["type"] == "integer", schema
    return default + 1 if default + 1 <= schema.get("maximum", default + 1) else default - 1


# Most values do something only beside others: the first of these in which a value changes an object counts.
CONTEXTS = [
    {
        "security": {"apiKeys": {"existingSecret": "keys", "testSecret": "key"}},
        "router": {"autoscaling": {"enabled": True}},
        "worker": {"autoscaling": {"enabled": True}, "gpus": 1, "cache": {"persistent": True}},
        "model": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}},
        "grpcRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "backendTls": {"enabled": True}},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        "serviceAccount": {"create": True},
        "ingress": {"enabled": True, "host": "octavo.example"},
        "watching": {part: {"enabled": True} for part in ("monitor", "alerts", "dashboard")},
    },
    {
        "security": {"certManager": {"issuer": {"name": "internal-ca"}}},
        "store": {"existingSecret": "store"},
        "router": {"service": {"type": "LoadBalancer"}},
        "worker": {"autoscaling": {"enabled": True, "authentication": {"name": "prometheus"}}},
        "model": {"download": {"command": ["fetch"], "image": {"repository": "registry.example/mine"}}},
    },
    {"security": {"insecure": True}, "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}},
    {
        "security": {
            "certManager": {"enabled": False},
            "secrets": {role: role for role in ("router", "worker", "store", "operator", "client")},
        }
    },
]
# What the schema takes and the chart refuses, as other values do not fit, and its words.
REFUSED = {
    "inferencePool.enabled": "without TLS",
    "model.download.hub": "give hub, or a command",
    "security.certManager.enabled": "there is no certificate of the role",
    "worker.group.size": "do not go together",
    "security.insecure": "backendTls needs routers with TLS",
}


def merged(values, others):
    for name, value in others.items():
        values[name] = merged(values.get(name, {}), value) if isinstance(value, dict) else value
    return values


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def rendered(folder, values):
    """What Helm says: whether it could, and the objects or the error."""
    path = folder / f"{abs(hash(json.dumps(values, sort_keys=True)))}.json"
    path.write_text(json.dumps(values))
    command = [tool("helm3"), "template", "trial", str(CHART), "-f", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode == 0, same_password(done.stdout) or done.stderr


@pytest.mark.timeout(300)
def test_each_value_changes_an_object(tmp_path):
    """Each value of the schema is given another value once. The chart then says something else, or refuses it."""
    plain = [rendered(tmp_path, context) for context in CONTEXTS]
    assert all(could for could, _ in plain), plain

    def is_idle(path):
        schema = LEAVES[path]
        for context, (_, before) in zip(CONTEXTS, plain, strict=True):
            default = value_at(merged(copy.deepcopy(VALUES), context), path)
            could, said = rendered(tmp_path, merged(copy.deepcopy(context), nested(path, other_value(schema, default))))
            if not could:
                assert path in REFUSED and REFUSED[path] in said, f"{path}: {said}"
            if said != before:
                return False
        return True

    with ThreadPoolExecutor(2) as pool:
        idle = list(pool.map(is_idle, LEAVES))
    assert len(idle) > 100
    assert [path for path, useless in zip(LEAVES, idle, strict=True) if useless] == []


def wrong_value(schema):
    if "enum" in schema:
        return "wrong"
    return {"object": "wrong", "array": "wrong", "string": 17, "boolean": "wrong", "integer": "wrong"}[schema["type"]]


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_the_schema_refuses_a_wrong_kind_of_value_by_name(helm, tmp_path):
    """All values at once: the message names each of them."""
    path = tmp_path / "values.json"
    values = {}
    for name, schema in LEAVES.items():
        merged(values, nested(name, wrong_value(schema)))
    path.write_text(json.dumps(values))
    said = run(tool(helm), "lint", CHART, "-f", path, ok=False)
    said += run(tool(helm), "template", "trial", CHART, "-f", path, ok=False)
    said = said.replace("/", ".")
    assert [name for name in LEAVES if name not in said] == []


def test_an_unknown_value_is_refused_wherever_it_stands(tmp_path):
    folders = {path.rpartition(".")[0] for path in LEAVES}
    path = tmp_path / "values.json"
    values = {}
    for folder in folders:
        merged(values, nested(f"{folder}.gizmo" if folder else "gizmo", 1))
    path.write_text(json.dumps(values))
    said = run(tool("helm3"), "template", "trial", CHART, "-f", path, ok=False)
    assert said.count("gizmo") == len(folders), said


TWO = "models[0].name=small,models[1].name=large"
CLAIM = "model.volume.persistentVolumeClaim.claimName"
SCALED = "{0}.autoscaling.enabled=true,{0}.autoscaling.minReplicas=2,{0}.autoscaling.maxReplicas=1"
GROUP = "worker.group.size=3"
SECURE = "ingress.enabled=false,grpcRoute.enabled=true,grpcRoute.parentRefs[0].name=x,grpcRoute.backendTls.enabled=true"
OWN = "worker.env: {0} is the chart's own: give settings in worker.settings"
EQUALLY = "has to be a multiple of worker.group.size: each host has equally many"


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("router.settings.threads=4", "threads"),
        ("worker.settings.store=redis://x", "store"),
        ("worker.settings.tls_cert=x", "tls_cert"),
        ("worker.device=tpu", "device"),
        ("store.url=http://x", "url"),
        ("modle.path=x", "modle"),
        ("cells[0].name=Cell_A", "cells.0.name"),
        ("cells[0].nmae=a", "nmae"),
        ("cells[0].name=a,store.url=redis://one", "a cell has a store of its own"),
        ("worker.pools[0].name=a,worker.pools[0].rolle=both", "rolle"),
        ("store.bundled.replicas=1,store.bundled.persistence.enabled=false", "needs bundled.persistence"),
        ("grpcRoute.enabled=true", "parentRefs must name a gateway"),
        ("httpRoute.enabled=true", "parentRefs must name a gateway"),
        ("ingress.enabled=true", "host must be the name"),
        ("router.podLabels.octavo/cell=a", "router.podLabels"),  # Services would find other pods than they should
        ("models[0].name=a,models[0].worker.podLabels.octavo/model=b", "models.0.worker.podLabels"),
        # Objects of one name, which the API server would see in the midst of an installation.
        *(
            (f"{items}[0].name=a,{items}[1].name=a", f"{items}: two have")
            for items in ("models", "cells", "worker.pools")
        ),
        (f"{TWO},models[1].model.name=small", "models: two have the name small"),
        (f"{TWO},{CLAIM}=models,models[1].{CLAIM}=others", "give each a mountPath of its own"),
        *((SCALED.format(part), f"octavo-{part}: autoscaling.minReplicas is above") for part in ("router", "worker")),
        (f"{GROUP},worker.settings.tensor_parallel=4", EQUALLY),
        (f"{GROUP},worker.settings.pipeline_parallel=4", EQUALLY),
        (
            f"{GROUP},worker.settings.tensor_parallel=3,worker.settings.pipeline_parallel=2",
            "the one has to be a multiple of the other",
        ),
        (f"{GROUP},worker.cache.persistent=true", "do not go together"),
        *(
            (f"worker.env[0].name={name},worker.env[0].value=4", OWN.format(name))
            for name in ("OCTAVO_WORKER_THREADS", "HOME", "STORE_PASSWORD")
        ),
        # What would not be secure.
        ("security.certManager.enabled=false", "there is no certificate of the role"),
        ("security.clientCertificates=false", "give security.apiKeys"),
        ("security.insecure=true,security.clientCertificates=false", "leave TLS on"),
        ("security.insecure=true,security.secrets.router=mine", "choose one of them"),
        (f"{SECURE},security.insecure=true", "needs routers with TLS"),
    ],
)
def test_what_does_not_go_is_refused_by_name_and_with_the_remedy(option, what):
    said = run(tool("helm3"), "template", "trial", CHART, "--set", option, ok=False)
    assert what in said or what in re.sub(r"(?<=\w)/(?=\w)", ".", said)


def is_value(path):
    """Whether the schema has such a value, or a setting of that name where settings are given by name."""
    schema = SCHEMA
    for name in path.split("."):
        if name in schema.get("propertyNames", {}).get("enum", ()):
            return True
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def test_the_guides_name_values_that_exist():
    named = set()
    for page in ("docs/deployment.md", "k8s/README.md", "k8s/chart/templates/NOTES.txt", "docs/decisions/k8s.md"):
        named |= set(re.findall(r"(?<![\w./{-])[a-z]\w*(?:\.\w+)+", (ROOT / page).read_text()))
    values = {path for path in named if path.partition(".")[0] in VALUES and not path.endswith(".md")}
    assert len(values) > 30
    assert {path for path in values if not is_value(path)} == set()
    assert not is_value("worker.cacheSize")
