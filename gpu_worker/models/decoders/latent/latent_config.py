"""The sizes of latent attention, and how they are read from a Transformers configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.request.errors import BadModel

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "minicpm3", "youtu")
# Whose dimensions turn with those half of them away, and with their neighbours, whatever `rope_interleave` says.
HALVES_TURN, NEIGHBOURS_TURN = ("minicpm3",), ("deepseek_v2",)
EPS = 1e-6  # of the norms of latents, whatever the model's other norms have


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """A page holds `rotated + rank` numbers of a token: what is rotated of a key, then the latent."""

    rank: int
    query_rank: int  # of the latent that queries are made of; 0: they are made of the states
    plain: int  # dimensions of a head's query that are not rotated
    rotated: int
    values: int  # dimensions of a head's values
    scale: float  # of scores
    interleaved: bool  # whether dimensions that turn together lie beside each other in checkpoints

    @property
    def width(self) -> int:
        return self.rotated + self.rank

    @property
    def query(self) -> int:
        return self.rotated + self.plain

    @property
    def sizes(self) -> dict[str, Any]:
        """As the extension takes them."""
        names = ("rank", "query_rank", "rotated", "plain", "values")
        return {"eps": EPS, **{name: getattr(self, name) for name in names}}


def read_latent(config: Mapping[str, Any], stretch: float) -> LatentConfig | None:
    """None for a model whose heads have keys and values of their own. Scores are multiplied with `stretch` twice."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return None
    plain, rotated = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    latent = LatentConfig(
        rank=int(config["kv_lora_rank"]),
        query_rank=int(config.get("q_lora_rank") or 0),
        plain=plain,
        rotated=rotated,
        values=int(config.get("v_head_dim") or config["hidden_size"] // config["num_attention_heads"]),
        scale=(plain + rotated) ** -0.5 * stretch**2,
        interleaved=family in NEIGHBOURS_TURN
        or (family not in HALVES_TURN and bool(config.get("rope_interleave", True))),
    )
    if min(latent.rank, plain, rotated, latent.values) < 1 or rotated % 2 or latent.query_rank < 0:
        raise BadModel(
            f"config.json: latents of {latent.rank} (kv_lora_rank) with heads of {plain} and {rotated} "
            f"(qk_nope_head_dim, qk_rope_head_dim) and values of {latent.values} (v_head_dim)"
        )
    return latent
