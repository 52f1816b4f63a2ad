"""The accounts of a model's queue: what each tenant was charged, which decides the order, and the drain rate."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from octavo.request.record import Record

OUTPUT_WEIGHT = 2  # a token of output costs a worker about as much as two of a prompt
ARRIVALS = 1024  # among equal places the order of arrival decides; so many arrivals can be told apart
WINDOW_MS = 1000  # the shortest time over which the drain rate is measured
SMOOTHING_MS = 4000  # a window of this length replaces the rate measured before; a shorter one, in proportion
OUTPUTS = 16  # the usual length of an output is that of about so many outputs
BURSTS = 16  # how many bursts a head start is
SHARE_ONE = 65536  # the share of starts is counted in so many parts
STARTS = 64  # the share of starts is that of about so many starts
KEPT_PER_SHARE = 10  # places that are kept if all that starts is under its share
MIN_FLOWS = 64  # so many flows need no sweep
MAX_FLOWS = 2048  # flows that are left after a sweep


class TenantShare(StrEnum):
    """Whether a tenant has had more tokens than its share when one of its sequences was accepted."""

    NEAR = ""
    UNDER = "under"  # at least half a burst less than the busy tenants, whose sequences wait
    OVER = "over"


class QueuePlace(NamedTuple):
    """Where a sequence waits. Lower places come first."""

    tag: int  # the tenant's counter when the sequence was accepted
    place: int
    charge: int
    share: TenantShare


@dataclass(slots=True)
class TenantAccount:
    """What a tenant was charged in one class."""

    counter: int
    credit: int = 0  # charged for tokens that were never computed: the next sequences are charged less, or more if < 0


@dataclass(slots=True)
class FairQueue:
    """Start-time fair queueing between the tenants of a model, for each class.

    A sequence's tag is the larger one of its tenant's counter, which then grows by the charge, and the virtual time
    less a burst. The virtual time is the highest tag of what was taken.
    """

    virtual_time: int = 0
    num_arrivals: int = 0
    window_since_ms: int = 0
    window_tokens: int = 0
    tokens_per_s: int = 0
    lengths: int = 0  # the usual length of an output, times OUTPUTS; 0: not known
    under: int = 0  # how many of what starts is under its tenant's share, in parts of SHARE_ONE
    sweep_at: int = MIN_FLOWS  # the number of accounts at which they are swept
    accounts: dict[tuple[int, str], TenantAccount] = field(default_factory=dict)  # by class and tenant

    def begin_window(self, now_ms: int) -> None:
        """Idle time is no slow draining, so a window begins when an empty queue gets a sequence."""
        self.window_since_ms, self.window_tokens = now_ms, 0

    def drain_rate(self, now_ms: int) -> int:
        """The tokens that leave the queue per second, with what the window under way has seen; 0: not known."""
        span = now_ms - self.window_since_ms
        if span < WINDOW_MS:
            return self.tokens_per_s
        measured = self.window_tokens * 1000 // span
        return math.floor(self.tokens_per_s + (measured - self.tokens_per_s) * min(1, span / SMOOTHING_MS))

    def charge(self, record: Record, head_start: int, *, others_wait: bool) -> QueuePlace:
        """Charges the tenant of a new sequence for an output of the usual length, and gives the sequence its place."""
        flow, burst = (record.priority, record.tenant), head_start // BURSTS
        floor = self.virtual_time - burst
        account = self.accounts.get(flow)
        if account is None and len(self.accounts) >= self.sweep_at:
            self._sweep_accounts(floor)
        if account is None or account.counter <= floor:
            account = self.accounts[flow] = TenantAccount(floor)
        tag, charge = account.counter, _charge_of(record, self.expected_output(record))
        spent = min(account.credit, charge - 1)
        account.counter, account.credit = tag + charge - spent, account.credit - spent
        share = TenantShare.NEAR
        if tag > self.virtual_time:
            share = TenantShare.OVER
        elif others_wait and tag <= self.virtual_time - math.ceil(burst / 2):
            share = TenantShare.UNDER
        self.num_arrivals += 1
        rank = tag + (record.priority - 1) * head_start
        return QueuePlace(tag, rank * ARRIVALS + self.num_arrivals % ARRIVALS, charge, share)

    def expected_output(self, record: Record) -> int:
        """How many tokens of output are expected of a new sequence: that of the usual length, in each branch."""
        usual = self.lengths // OUTPUTS + 1 if self.lengths else record.max_tokens
        return min(usual, record.max_tokens) * record.num_branches

    def _sweep_accounts(self, floor: int) -> None:
        """Forgets accounts that are as if they had never been, and the lowest ones where too many are left."""

        def order(flow: tuple[int, str]) -> tuple[int, str]:
            return self.accounts[flow].counter, f"{flow[0]}:{flow[1]}"

        left = sorted((flow for flow, account in self.accounts.items() if account.counter > floor), key=order)
        self.accounts = {flow: self.accounts[flow] for flow in left[-MAX_FLOWS:]}
        self.sweep_at = max(MIN_FLOWS, 2 * len(self.accounts))

    def forget_tenants(self) -> None:
        """All tenants are equal again."""
        self.accounts.clear()
        self.sweep_at = MIN_FLOWS

    def kept_places(self, most: int) -> int:
        """How many of the workers' last places are kept for sequences that are not over their tenant's share."""
        return min(most, math.floor(self.under * KEPT_PER_SHARE / SHARE_ONE + 0.5))

    def correct_charge(self, record: Record, charge: int, num_tokens: int | None) -> None:
        """Corrects the charge of a sequence that has ended with so many tokens, or without an owner ever (None).

        The charge of a sequence that only waited is taken off the counter. A sequence that used less than its charge
        leaves credit, one that used more leaves debt: so the tenant's next sequences do not overtake those that wait.
        """
        flow = (record.priority, record.tenant)
        account = self.accounts.get(flow)
        if account is None and (self.lengths or num_tokens is None):
            return
        if num_tokens is not None:
            length = num_tokens // record.num_branches
            self.lengths = self.lengths - self.lengths // OUTPUTS + length if self.lengths else OUTPUTS * length
        if account is None:
            return
        if num_tokens is None:
            account.counter -= charge
        else:
            account.credit += charge - _charge_of(record, num_tokens)

    def note_left(self, cost: int, now_ms: int) -> None:
        """A sequence waits no more: it was taken, or has ended."""
        if now_ms - self.window_since_ms >= WINDOW_MS:
            self.tokens_per_s = self.drain_rate(now_ms)
            self.begin_window(now_ms)
        self.window_tokens += cost

    def note_taken(self, queued: QueuePlace, *, is_new: bool) -> None:
        """A sequence has got an owner; `is_new`: its first one."""
        self.virtual_time = max(self.virtual_time, queued.tag)
        if is_new:
            self.under += ((SHARE_ONE if queued.share is TenantShare.UNDER else 0) - self.under) // STARTS


def _charge_of(record: Record, num_tokens: int) -> int:
    return max(1, record.prompt_len + OUTPUT_WEIGHT * num_tokens)
