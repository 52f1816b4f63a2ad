"""What a worker says of itself in its answer to Hello, as plain values."""

from octavo.internal.v1 import worker_pb2
from octavo.model_files.lora_support import LoraSupport
from octavo.pictures.support import NO_PICTURES, PictureSupport
from octavo.request.ids import Incarnation
from octavo.text.encoded_prompt import EncoderSupport, SpeechSupport
from octavo.wire.internal import role_from_wire
from octavo.wire.pooling import model_pooling_from_wire
from octavo.wire.public import recommended_from_wire
from router.fleet.model_registry import WorkerFacts


def facts_of(hello: worker_pb2.HelloResponse) -> WorkerFacts:
    return WorkerFacts(
        worker_id=hello.worker_id,
        incarnation=Incarnation(hello.incarnation),
        model=hello.model,
        fingerprint=hello.model_fingerprint,
        layout=hello.kv_layout,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        context_tokens=hello.context_tokens,
        vocab_size=hello.vocab_size,
        tokenizer=hello.tokenizer,
        eos_token_ids=tuple(hello.eos_token_ids),
        max_batch_tokens=hello.max_batch_tokens,
        max_batch_sequences=hello.max_batch_sequences,
        device=hello.device,
        sampling_defaults=recommended_from_wire(hello.sampling_defaults),
        max_sequence_blocks=hello.max_sequence_blocks,
        role=role_from_wire(hello.role),
        numerics=hello.numerics,
        pooling=model_pooling_from_wire(hello.pooling),
        lora_support=support_of(hello.lora_support),
        encoder=encoder_of(hello.encoder_support),
        pictures=pictures_of(hello.picture_support) if hello.HasField("picture_support") else NO_PICTURES,
    )


def pictures_of(message: worker_pb2.PictureSupport) -> PictureSupport:
    return PictureSupport(
        refusal=message.refusal,
        token_id=message.token_id,
        cell=message.cell,
        min_pixels=message.min_pixels,
        max_pixels=message.max_pixels,
        num_positions=message.num_positions,
    )


def encoder_of(message: worker_pb2.EncoderSupport) -> EncoderSupport:
    return EncoderSupport(
        start=tuple(message.start),
        max_encoded=message.max_encoded,
        max_output=message.max_output,
        speech=speech_of(message.speech) if message.HasField("speech") else None,
    )


def speech_of(message: worker_pb2.SpeechSupport) -> SpeechSupport:
    return SpeechSupport(
        placeholder=message.placeholder,
        start=message.start,
        no_timestamps=message.no_timestamps,
        previous=message.previous,
        max_previous=message.max_previous,
        languages=dict(message.languages),
        tasks=dict(message.tasks),
    )


def support_of(message: worker_pb2.LoraSupport) -> LoraSupport:
    return LoraSupport(
        refusal=message.refusal,
        num_layers=message.num_layers,
        shapes={module.name: (module.outputs, module.inputs) for module in message.modules},
        expert_layers=tuple(message.expert_layers),
        max_bytes=message.max_bytes,
    )
