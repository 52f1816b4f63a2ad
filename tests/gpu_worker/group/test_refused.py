"""What no group runs is refused before it loads, by the setting's name and with what to do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from folder_llama import folder_llama

from gpu_worker.group.hosts.host_streams import HostPlace, HostStreams
from gpu_worker.group.loading import load_group
from gpu_worker.group.rank_task import RankTask
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.running.loading import load_runner
from octavo.request.errors import InvalidArgument
from octavo.settings.worker import WorkerSettings
from octavo.wire.endpoint import Endpoint

from .conftest import SIZES

GPT2 = {"vocab_size": 64, "n_embd": 48, "n_layer": 1, "n_head": 2, "n_positions": 64}
SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
OPT = {**SMALL, "hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32}
MIXTRAL = {**SMALL, "hidden_size": 64, "intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 2}
YOUTU = {**SMALL, "hidden_size": 32, "intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16}
YOUTU |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
UNEVEN = {"intermediate_size": 72}  # the up projection's rows begin within a packed group of the gate's


def saved(kind: str, **fields: object) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        config = getattr(transformers, f"{kind}Config")(**fields)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return save


gpt, through_transformers, mixture = saved("GPT2", **GPT2), saved("OPT", **OPT), saved("Mixtral", **MIXTRAL)
narrow, uneven_mixture = saved("GPT2", **{**GPT2, "n_head": 4}), saved("Mixtral", **{**MIXTRAL, **UNEVEN})
latent = saved("Youtu", **YOUTU)
uneven = partial(folder_llama, num_hidden_layers=1, **UNEVEN)


@pytest.mark.parametrize(
    ("model", "size", "options", "says"),
    [
        (folder_llama, 4, {"stages": 4}, "this model has 3 layers: give no more stages"),
        (through_transformers, 2, {}, "runs models like Llama, .* and like GPT alone: leave it out"),
        (latent, 2, {}, r"a group divides no latent attention \(MLA\): leave it out"),
        (folder_llama, 8, {}, "this model is too small for 8 ranks: give fewer"),
        (uneven, 2, {"dtype": "bfloat16", "quantization": "none"}, "rows that are packed together: leave it out"),
        (mixture, 3, {}, "this model is too small for 3 ranks: give fewer"),
        (uneven_mixture, 2, {"dtype": "bfloat16", "quantization": "none"}, "rows that are packed together: leave it"),
        (gpt, 4, {}, "this model is too small for 4 ranks: give fewer"),
        (gpt, 2, {"stages": 2}, "this model has 1 layers: give no more stages"),
        (narrow, 2, {}, "heads of 12 numbers, which are no multiple of 8 up to 1024, .*: leave it out"),
    ],
)
def test_a_model_that_is_not_divided_is_refused(tmp_path, model, size, options, says):
    stages = options.get("stages", 1)
    given = {name: value for name, value in {**SIZES, **options}.items() if name != "stages"}
    with SharedMemory.create("team") as team, SharedMemory.create("arena") as arena:
        task = RankTask(
            rank=0,
            size=size,
            stages=stages,
            team=team.descriptor,
            arena=arena.descriptor,
            tokens=8,
            sequences=8,
            patience_s=1.0,
            options=SIZES,
        )
        with pytest.raises(InvalidArgument, match=f"^(tensor_parallel|pipeline_parallel): .*{says}"):
            load_runner(str(model(tmp_path / "model")), **given, place=task.place())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"host_rank": -1},
            "^launcher: MASTER_ADDR, .* do not say which of several hosts this is: start with torchrun",
        ),
        ({"host_rank": 2}, "^launcher: MASTER_ADDR, "),
        ({"hosts": 1}, "^launcher: MASTER_ADDR, "),
        ({"meeting_at": ""}, "^launcher: MASTER_ADDR, "),
        ({"local_world_size": 2}, "^launcher: each host has one process, .*: --nproc-per-node 1$"),
    ],
)
def test_hosts_are_not_guessed(changes: dict[str, Any], says: str) -> None:
    whole: dict[str, Any] = {"hosts": 2, "host_rank": 0, "meeting_at": "here:1"}
    with pytest.raises(InvalidArgument, match=says):
        HostPlace.of(WorkerSettings(launcher="torchrun", **{**whole, **changes}))


@pytest.mark.parametrize(
    ("ranks", "stages", "says"),
    [
        (3, 1, "^tensor_parallel: 3 ranks are not equally many on 2 hosts: give a multiple$"),
        (2, 3, "^pipeline_parallel: 3 stages and 2 hosts: the one is to be a multiple of the other, "),
    ],
)
def test_hosts_that_cannot_share_are_refused(ranks: int, stages: int, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        load_group(
            "smollm2",
            ranks=ranks,
            stages=stages,
            streams=HostStreams(HostPlace(0, 2, Endpoint("here", 1))),
            patience_s=1.0,
            **SIZES,
        )
