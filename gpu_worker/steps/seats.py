"""What a runner knows of branches, from step inputs alone: tokens, block table and sampling parameters, by seat."""

from array import array
from dataclasses import dataclass, field

from gpu_worker.steps.step_input import StepInput, ints
from octavo.request.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Seat:
    """One branch, up to the end of its chunk in the latest step. Tokens are only ever added."""

    params: SamplingParams
    tokens: list[int]  # prompt, then output
    num_prompt: int
    index: int = 0  # of the branch, which its draws depend on
    root: bytes = b""
    mask: bytes | None = None  # the tokens that may come next; None: all
    table: "array[int]" = field(default_factory=ints)  # int32: its blocks

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def before(self, position: int) -> "Seat":
        """This branch as it was when it had the tokens before `position`."""
        return Seat(self.params, self.tokens[:position], self.num_prompt, self.index)


class Seats:
    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}

    def update(self, step: StepInput) -> None:
        """Takes in what an input says is new. It comes before all that the runner does for the step."""
        if any(opened.adapter for opened in step.opened):
            raise ValueError("no runner has adapters")
        seats = self._seats
        for number in step.left:
            seats.pop(number, None)
        for opened in step.opened:
            seats[opened.seat] = Seat(opened.params, opened.tokens.tolist(), opened.num_prompt, root=opened.root)
        for change in step.tables:
            seats[change.seat].table[change.first :] = change.blocks
        tokens, num_decodes = step.tokens, step.num_decodes
        for number, token in zip(step.seats[:num_decodes], tokens, strict=False):
            seats[number].tokens.append(token)
        first = num_decodes
        for number, length in zip(step.seats[num_decodes:], step.lengths[num_decodes:], strict=True):
            seats[number].tokens += tokens[first : first + length]
            first += length

    def samples(self, step: StepInput) -> list[Seat]:
        """For each sample the branch whose parameters and history count. Branches that are to fork get copies."""
        found: list[Seat] = []
        before = -1
        for place, (number, branch) in enumerate(zip(step.sample_seats, step.sample_branches, strict=True)):
            seat = self._seats[number]
            if number == before:
                seat = Seat(seat.params, seat.tokens, seat.num_prompt)
            seat.index, seat.mask, before = branch, step.masks.get(place), number
            found.append(seat)
        return found

    def of_chunks(self, step: StepInput) -> list[Seat]:
        return [self._seats[number] for number in step.seats]
