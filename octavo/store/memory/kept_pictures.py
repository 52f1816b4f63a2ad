"""The pictures of sequences, as long as their prompts are kept."""

from dataclasses import dataclass, field

from octavo.request.ids import SequenceId

UNACCEPTED_MS = 60 * 1000


@dataclass(slots=True)
class PicturesOfSequence:
    pixels: dict[str, bytes] = field(default_factory=dict)  # by digest
    until_ms: int | None = None  # None: the sequence is accepted


@dataclass(slots=True)
class KeptPictures:
    _kept: dict[SequenceId, PicturesOfSequence] = field(default_factory=dict)

    def keep(self, seq_id: SequenceId, digest: str, pixels: bytes, now_ms: int) -> bool:
        """Keeps one for a sequence that is about to be accepted. True."""
        self._kept = {
            each: pictures
            for each, pictures in self._kept.items()
            if pictures.until_ms is None or pictures.until_ms > now_ms
        }
        pictures = self._kept.setdefault(seq_id, PicturesOfSequence())
        pictures.pixels[digest], pictures.until_ms = pixels, now_ms + UNACCEPTED_MS
        return True

    def find(self, seq_id: SequenceId, digest: str, now_ms: int) -> bytes:
        """Empty: it is not kept."""
        pictures = self._kept.get(seq_id)
        if pictures is None or (pictures.until_ms is not None and pictures.until_ms <= now_ms):
            return b""
        return pictures.pixels.get(digest, b"")

    def accept(self, seq_id: SequenceId, now_ms: int) -> None:
        """The sequence is accepted: its pictures are kept as long as its prompt, if they are there still."""
        pictures = self._kept.get(seq_id)
        if pictures is not None and pictures.until_ms is not None and pictures.until_ms > now_ms:
            pictures.until_ms = None

    def drop(self, seq_id: SequenceId) -> None:
        self._kept.pop(seq_id, None)

    def drop_accepted(self, seq_id: SequenceId) -> None:
        """The record is gone. What was kept for one that is still to be accepted stays."""
        if (pictures := self._kept.get(seq_id)) is not None and pictures.until_ms is None:
            self.drop(seq_id)
