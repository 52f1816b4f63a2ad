"""What a runner knows of branches, from step inputs alone: tokens, block table and sampling parameters, by seat."""

from array import array
from dataclasses import dataclass, field

from gpu_worker.steps.mask import Mask
from gpu_worker.steps.step_input import StepInput, ints
from octavo.pictures.picture import Picture, parse_pictures
from octavo.request.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Seat:
    """One branch, up to the end of its chunk in the latest step. Tokens are only ever added.

    `drafts` are the last tokens of that chunk if they are guesses: the branch gets those of them that come before the
    first token of its next chunk. Nobody has to say which that are: the position of that chunk does.
    """

    params: SamplingParams
    tokens: list[int]  # prompt, then output
    num_prompt: int
    index: int = 0  # of the branch, which its draws depend on
    root: bytes = b""
    adapter: int = 0  # which low-rank adapter it runs with; 0: none
    pictures: tuple[Picture, ...] = ()  # that its tokens show
    num_encoded: int = 0  # how many of its leading tokens an encoder reads
    encoded: list[int] = field(default_factory=list)  # all of these, until their keys and values are there
    encoding: object = None  # what the encoder gave for them, which is the runner's own, until then
    mask: Mask | None = None  # the tokens that may come next; None: all
    table: "array[int]" = field(default_factory=ints)  # int32: its blocks
    drafts: list[int] = field(default_factory=list)
    base: "Seat | None" = None  # the branch without the drafts that are among the tokens here

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def run_tokens(self, start: int, end: int) -> list[int]:
        """Its tokens at these positions, drafts included: `end` is the end of its chunk in the latest step."""
        tokens = self.tokens[start:end]
        return [*tokens, *self.drafts] if self.drafts else tokens

    def with_drafts(self, count: int) -> "Seat":
        """This branch as it will be if it gets the first `count` of its drafts."""
        tokens = [*self.tokens, *self.drafts[:count]]
        return Seat(self.params, tokens, self.num_prompt, self.index, base=self, num_encoded=self.num_encoded)

    def before(self, position: int) -> "Seat":
        """This branch as it was when it had the tokens before `position`."""
        tokens = self.tokens[:position]
        return Seat(self.params, tokens, self.num_prompt, self.index, num_encoded=self.num_encoded)


class Seats:
    def __init__(self, *, with_adapters: bool = False, with_pictures: bool = False) -> None:
        self._with_adapters = with_adapters
        self._with_pictures = with_pictures
        self._seats: dict[int, Seat] = {}
        self._drafted: dict[int, Seat] = {}  # those with drafts of which the next chunk will say what became

    def update(self, step: StepInput) -> None:
        """Takes in what an input says is new. It comes before all that the runner does for the step."""
        if not self._with_adapters and any(opened.adapter for opened in step.opened):
            raise ValueError("this runner has no adapters")
        if not self._with_pictures and any(opened.pictures for opened in step.opened):
            raise ValueError("this runner has no pictures")
        seats = self._seats
        if self._drafted:
            self._settle_drafts(step)
        for number in step.left:
            seats.pop(number, None)
        for opened in step.opened:
            seat = Seat(opened.params, opened.tokens.tolist(), opened.num_prompt, root=opened.root)
            seat.adapter, seat.pictures = opened.adapter, parse_pictures(opened.pictures)
            seat.num_encoded, seat.encoded = opened.num_encoded, opened.encoded.tolist()
            seats[opened.seat] = seat
        for change in step.tables:
            seats[change.seat].table[change.first :] = change.blocks
        tokens, num_decodes = step.tokens, step.num_decodes
        for number, token in zip(step.seats[:num_decodes], tokens, strict=False):
            seats[number].tokens.append(token)
        first, end = num_decodes, num_decodes + step.num_drafted
        for number, length in zip(step.seats[num_decodes:end], step.lengths[num_decodes:end], strict=True):
            seat = self._drafted[number] = seats[number]
            seat.tokens.append(tokens[first])
            seat.drafts = tokens[first + 1 : first + length].tolist()
            first += length
        for number, length in zip(step.seats[end:], step.lengths[end:], strict=True):
            seats[number].tokens += tokens[first : first + length]
            first += length

    def _settle_drafts(self, step: StepInput) -> None:
        """Gives the branches of the step those of their drafts that come before their chunks."""
        for number in (*step.left, *(opened.seat for opened in step.opened)):
            self._drafted.pop(number, None)
        for number, length, end in zip(step.seats, step.lengths, step.ends, strict=True):
            if (seat := self._drafted.pop(number, None)) is not None:
                seat.tokens += seat.drafts[: end - length - len(seat.tokens)]
                seat.drafts = []

    def samples(self, step: StepInput) -> list[Seat]:
        """For each sample the branch whose parameters and history count.

        Branches that are to fork get copies. So does a branch for each draft, which is in the history of the copy.
        """
        found: list[Seat] = []
        before, first = -1, 0
        for place, (number, branch) in enumerate(zip(step.sample_seats, step.sample_branches, strict=True)):
            seat = self._seats[number]
            if number != before:
                first = place
            elif seat.drafts:
                seat = seat.with_drafts(place - first)
            else:
                seat = Seat(seat.params, seat.tokens, seat.num_prompt, num_encoded=seat.num_encoded)
            seat.index, seat.mask, before = branch, step.masks.get(place), number
            found.append(seat)
        return found

    def find(self, number: int) -> Seat:
        return self._seats[number]

    def of_chunks(self, step: StepInput) -> list[Seat]:
        return [self._seats[number] for number in step.seats]
