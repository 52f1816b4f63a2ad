"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Transformers' own model, in whose prompts pictures stand.

Its attention is causal over placeholders, too, so pages hold what they hold of text. A token has three positions (of
time, row and column), which are a function of the prompt and of where its pictures stand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from gpu_worker.models.through_transformers.attention import IMPLEMENTATION, current_batch
from gpu_worker.models.through_transformers.decoder import CHECK_TOLERANCE, TransformersDecoder
from gpu_worker.models.through_transformers.pictures.config import PicturePatches, read_patches
from gpu_worker.models.through_transformers.pictures.encoder import CHECKED_CELLS, PictureEncoder, multiply_by_ops
from gpu_worker.ops import Ops, TokenBatch
from gpu_worker.ops.batch import PictureRows, make_batch
from gpu_worker.ops.kv_format import KvShape
from octavo.request.errors import BadModel


class PictureDecoder(TransformersDecoder):
    """A TransformersDecoder whose batches may have pictures."""

    auto_model = AutoModelForImageTextToText
    products = "by-ops"  # on a CPU: what a class of numerics has of `multiply_by_ops`
    attention: Mapping[str, str] = {"": IMPLEMENTATION, "text_config": IMPLEMENTATION, "vision_config": "sdpa"}

    def __init__(self, model: nn.Module, ops: Ops, device: torch.device, patches: PicturePatches) -> None:
        self._patches = patches
        if device.type == "cpu":
            multiply_by_ops(model, ops)
        super().__init__(model, ops, device)
        self.picture_support = patches.support
        inner = cast("Any", model).model
        self._encoder = PictureEncoder(inner.visual, patches, self.hidden_size, device)
        self.encode_picture = self._encoder
        if self._encoder.num_states > 1:
            inner.language_model.register_forward_pre_hook(self._with_deeper_states, with_kwargs=True)

    @classmethod
    def load_with_pictures(
        cls, directory: Path, config: Mapping[str, Any], dtype: torch.dtype, ops: Ops, device: torch.device
    ) -> "PictureDecoder":
        """Loads the model of `directory`, whose config.json is `config`. Raises BadModel as `load` does."""
        patches = read_patches(directory, config)
        return cast("PictureDecoder", cls.load(directory, dtype, ops, device, patches=patches))

    def _inputs(self, batch: TokenBatch) -> dict[str, Tensor]:
        pictures = batch.pictures
        if pictures is None:
            return super()._inputs(batch)
        states: Tensor = cast("Any", self._model).get_input_embeddings()(batch.token_ids)
        states[pictures.rows] = pictures.states[:, : states.shape[1]].to(states.dtype)
        return {"inputs_embeds": states.unsqueeze(0), "position_ids": pictures.positions.unsqueeze(1)}

    def _with_deeper_states(
        self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the layers run: what is added to the outputs of the first ones, where the step shows pictures."""
        batch = current_batch()
        if batch is None or batch.pictures is None or not len(batch.pictures.rows):
            return None
        shown = torch.zeros((1, len(batch.token_ids)), dtype=torch.bool, device=self._device)
        shown[0, batch.pictures.rows] = True
        states = batch.pictures.states.chunk(self._encoder.num_states, dim=1)
        return arguments, {**options, "visual_pos_masks": shown, "deepstack_visual_embeds": list(states[1:])}

    @torch.inference_mode()
    def verify(self) -> None:
        """Also runs a prompt with a picture, in two pieces, and compares it with what the model itself computes."""
        super().verify()
        if self._patches.support.refusal:
            return
        (rows, columns), cell, mark = CHECKED_CELLS, self._patches.support.cell, self._patches.support.token_id
        size = rows * columns
        pixels = bytes(i * 97 % 256 for i in range(size * cell * cell * 3))
        text = [(i * 7919 + 13) % self.vocab_size for i in range(8)]
        before, after = ([token for token in part if token != mark] for part in (text[:3], text[3:]))
        prompt = [*before, *[mark] * size, *after]
        first = len(before)
        grid = [(first, first + i // columns, first + i % columns) for i in range(size)]
        ends = [(p, p, p) for p in range(first + max(CHECKED_CELLS), first + max(CHECKED_CELLS) + len(after))]
        positions = torch.tensor([*((p, p, p) for p in range(first)), *grid, *ends], device=self._device).T
        states = self._encoder(pixels, rows * cell, columns * cell).to(self._device)
        last = self._through_pages(prompt, positions, states, first, split=first + columns)
        expected = self._whole(prompt, pixels, rows * cell, columns * cell, first, size)
        error = float((last.float() - expected.float()).abs().max() / expected.abs().max())
        if not error <= CHECK_TOLERANCE:
            reason = f"with a picture its logits differ by {error:.3g} of the largest through pages"
            raise BadModel(f"{self.name}: {reason}; it cannot be served")

    def _through_pages(self, prompt: list[int], positions: Tensor, states: Tensor, first: int, split: int) -> Tensor:
        """The logits of the last token of a prompt in two pieces, the first of which ends within the picture."""
        shape = KvShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=8,
            head_dim=self.head_dim,
            dtype=next(self._model.parameters()).dtype,
        )
        table = list(range(-(-len(prompt) // 8)))
        kv: Sequence[Tensor] = list(shape.allocate_arena(len(table), self._device).unbind(0))
        for start, end in ((0, split), (split, len(prompt))):
            places = list(range(start, end))
            batch = make_batch(prompt[start:end], places, places, [end - start], [end], [table], self._device)
            shown = [p for p in places if first <= p < first + len(states)]
            rows = torch.tensor([p - start for p in shown], device=self._device)
            batch.pictures = PictureRows(rows, states[[p - first for p in shown]], positions[:, start:end])
            last = self.forward(batch, kv, torch.tensor([end - start - 1], device=self._device))
        return last

    def _whole(self, prompt: list[int], pixels: bytes, height: int, width: int, first: int, size: int) -> Tensor:
        """The logits of the last token by the model's eager attention, which places and encodes the picture itself."""
        patches, grid = self._patches.patches_of(pixels, height, width)
        model = cast("Any", self._model)
        kinds = [int(first <= place < first + size) for place in range(len(prompt))]
        model.set_attn_implementation("eager")
        try:
            result = model(
                input_ids=torch.tensor([prompt], device=self._device),
                mm_token_type_ids=torch.tensor([kinds], device=self._device, dtype=torch.int32),
                pixel_values=patches.to(self._device, model.model.visual.dtype),
                image_grid_thw=grid.to(self._device),
                use_cache=False,
                logits_to_keep=1,
            )
            logits: Tensor = result.logits[0]
            return logits
        finally:
            model.set_attn_implementation(self.attention)
            model.model.rope_deltas = None
