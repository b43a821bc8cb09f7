"""Tests of how much prefill may delay running sequences, and which prompt is next, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import pytest

from dflash_ggml.session.prefill_budget import AGEING, GAP_STEPS, MAX_GAP, RECENT, SHARE, SIZES, PrefillBudget
from reference.serving_sim import CPU, DRAFTING, H100, LARGE_CPU, MEASURED, SMALL_CPU, Machine, load, served

SLOW_GPU = Machine(0.1, 1 / 800, 0.03, 0.001)  # its smallest chunk is longer than the gap
LONG_STEPS = Machine(0.02, 1 / 2000, 0.12, 0.002)
SMALL_GPU = Machine(0.001, 1 / 100000, 0.001, 0.0)
FITTING = {"27B": H100, "drafting": DRAFTING, "long steps": LONG_STEPS, "small": SMALL_GPU}
GPUS = {**FITTING, "slow": SLOW_GPU}
CPUS = {"small": SMALL_CPU, "medium": CPU, "large": LARGE_CPU}


@dataclass(frozen=True)
class Waiting:
    """A prompt."""

    remaining: int
    since: float = 0.0
    is_scoring: bool = False


class Beside:
    """A budget beside n sequences that never end, in virtual time."""

    def __init__(self, machine: Machine, n: int = 8) -> None:
        self.machine, self.n, self.budget = machine, n, PrefillBudget(machine.is_gpu)
        self.now = self.decoded = self.prefilled = self.gap = self.step_ended = 0.0
        self.sizes = list[int]()

    def chunk(self, *prompts: Waiting) -> tuple[int, int] | None:
        """Prefill a chunk, or decode a step where it is not time for one."""
        chosen = self.budget.choose(prompts, self.n, self.now)
        if chosen is None:
            self.step()
            return None
        took = self.machine.prefill(chosen[1])
        self.now, self.prefilled = self.now + took, self.prefilled + took
        self.sizes.append(chosen[1])
        self.budget.prefilled(chosen[1], took, True)
        return chosen

    def step(self) -> None:
        took = self.machine.decode(self.n)
        self.now, self.decoded = self.now + took, self.decoded + took
        self.gap, self.step_ended = max(self.gap, self.now - self.step_ended), self.now
        self.budget.decoded(took, self.n)

    def steps_until(self, *prompts: Waiting) -> int:
        """Steps before one of these is prefilled."""
        for n in range(10_000):
            if self.budget.choose(prompts, self.n, self.now) is not None:
                return n
            self.step()
        raise AssertionError("never prefilled")

    def settle(self, chunks: int = 40) -> None:
        """Learn what a long prompt's chunks cost."""
        while len(self.sizes) < chunks:
            self.chunk(Waiting(10**6))


@pytest.mark.parametrize("machine", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("n", [1, 8, 32])
def test_sequences_keep_a_third_of_their_speed_beside_prompts_without_end(machine: Machine, n: int):
    beside = Beside(machine, n)
    beside.settle(5)
    prefilled, decoded, worst = beside.prefilled, beside.decoded, 0.0
    for _ in range(3000):
        beside.chunk(Waiting(10**6))
        worst = max(worst, beside.prefilled - prefilled - SHARE[True] * (beside.decoded - decoded))
    bound = max(MAX_GAP, GAP_STEPS * machine.decode(n))
    assert worst <= max(bound, machine.prefill(256)), "never more than one gap ahead of what was earned"
    assert beside.now <= 3 * beside.decoded + bound


def test_prompts_get_what_they_may_have():
    beside = Beside(H100)
    beside.settle(200)
    assert beside.now >= 2.7 * beside.decoded


@pytest.mark.parametrize("machine", FITTING.values(), ids=FITTING)
@pytest.mark.parametrize("n", [1, 8, 32])
def test_no_gap_between_tokens_is_longer_than_the_bound(machine: Machine, n: int):
    beside = Beside(machine, n)
    for i in range(3000):
        beside.chunk(Waiting((10**6, 700, 300, 40, 3)[i % 5]))
    assert beside.gap <= max(MAX_GAP, GAP_STEPS * machine.decode(n))


def test_a_chunk_longer_than_the_gap_runs_alone_and_is_earned_again():
    """The smallest chunk takes 0.4 s: one is prefilled between two steps, and then as many steps as pay for it."""
    beside = Beside(SLOW_GPU)
    beside.settle(20)
    assert set(beside.sizes) == {256}
    assert beside.gap <= SLOW_GPU.prefill(256) + SLOW_GPU.decode(8) + 1e-9


@pytest.mark.parametrize("machine", CPUS.values(), ids=CPUS)
def test_on_a_cpu_prompts_slow_sequences_by_less_than_a_third(machine: Machine):
    beside = Beside(machine, 4)
    for _ in range(5000):
        beside.chunk(Waiting(10**6))
    assert (
        1.25 * beside.decoded
        <= beside.now
        <= 1.3 * beside.decoded + max(MAX_GAP, GAP_STEPS * machine.decode(4))
    )
    assert beside.gap <= max(MAX_GAP, GAP_STEPS * machine.decode(4))


def test_chunks_are_large_and_of_few_sizes():
    """Every size is a graph: a prompt's last tokens come in multiples of 64, of 8, and what is left."""
    beside, sizes = Beside(H100), set[int]()
    for remaining in range(1, 4000, 7):
        while remaining:
            chosen = beside.chunk(Waiting(remaining))
            if chosen is not None:
                assert chosen[1] >= min(remaining, 256) or remaining < 256
                sizes.add(chosen[1])
                remaining -= chosen[1]
    large = {size for size in sizes if size >= 256}
    assert large <= set(range(256, 1025, 64)) and len(sizes - large) <= 17


def test_without_decoding_batches_are_full():
    for is_gpu in (True, False):
        assert PrefillBudget(is_gpu).choose([Waiting(10**6)], 0, 0.0) == (0, SIZES[is_gpu][1])


def test_chunks_are_small_until_their_cost_is_known_then_what_fits():
    beside = Beside(H100)
    beside.settle()
    assert beside.sizes[0] == 256 and beside.sizes[-1] == 1024


def test_without_prompts_nothing_is_chosen():
    budget = PrefillBudget(True)
    assert budget.choose([], 0, 0.0) is None and budget.choose([], 3, 0.0) is None


def test_the_shortest_remaining_prompt_is_first():
    budget = PrefillBudget(True)
    assert budget.choose([Waiting(900), Waiting(300), Waiting(4000)], 0, 0.0) == (1, 256)
    assert budget.choose([Waiting(900), Waiting(1100), Waiting(800)], 0, 0.0) == (2, 768)
    assert budget.choose([Waiting(500, 1.0), Waiting(500, 0.5)], 0, 2.0) == (1, 448), "the older of two"


@pytest.mark.parametrize("machine", [H100, DRAFTING, CPU], ids=["27B", "drafting", "CPU"])
@pytest.mark.parametrize("short", [100, 1000])
def test_a_long_prompt_among_short_ones_without_end_is_prefilled_in_bounded_time(
    machine: Machine, short: int
):
    """There are always four short ones that came later. It is overtaken for 1 / AGEING times as long as it takes alone."""
    beside, long = Beside(machine), 4000
    beside.settle()
    began = beside.now
    shorts = [Waiting(short, beside.now + 0.001)] * 4
    started = None
    while started is None or long:
        chosen = beside.chunk(Waiting(long, began), *shorts)
        if chosen is None:
            continue
        index, tokens = chosen
        if index == 0:
            started, long = beside.now if started is None else started, long - tokens
        elif tokens < shorts[index - 1].remaining:
            shorts[index - 1] = Waiting(shorts[index - 1].remaining - tokens, shorts[index - 1].since)
        else:
            shorts[index - 1] = Waiting(short, beside.now)
    alone = 4000 / max(beside.sizes) * machine.prefill(max(beside.sizes))
    slower = (1 + SHARE[machine.is_gpu]) / SHARE[machine.is_gpu]
    assert started - began <= alone / AGEING + 5 * slower * machine.prefill(short)
    assert beside.now - began <= alone / AGEING + slower * (5 * machine.prefill(short) + 1.5 * alone)


def test_a_graph_that_is_built_is_no_cost_and_no_debt_of_many_steps():
    beside = Beside(H100)
    beside.settle()
    beside.budget.prefilled(1024, 30.0, True, is_warm=False)
    assert 1 <= beside.steps_until(Waiting(10**6)) <= 20
    assert beside.budget.choose([Waiting(10**6)], 8, beside.now) == (0, 1024)


def test_a_graph_of_unknown_cost_is_built_alone_between_two_steps():
    budget = PrefillBudget(True)
    assert budget.choose([Waiting(10**6)], 8, 0.0) == (0, 256)
    budget.prefilled(256, 0.01, True, is_warm=False)
    assert budget.choose([Waiting(10**6)], 8, 0.0) is None


@pytest.mark.parametrize(
    "contaminate",
    [lambda budget: budget.prefilled(1024, 3600.0, True), lambda budget: budget.decoded(3600.0, 8)],
    ids=["in a chunk", "in a step"],
)
def test_a_machine_that_slept_goes_on_as_before(contaminate: Callable[[PrefillBudget], None]):
    beside = Beside(H100)
    beside.settle()
    contaminate(beside.budget)
    beside.gap, beside.step_ended = 0.0, beside.now
    assert beside.steps_until(Waiting(10**6)) <= 20
    beside.settle(len(beside.sizes) + 5)
    assert beside.sizes[-1] == 1024 and beside.gap <= MAX_GAP


def test_chunks_follow_a_machine_that_gets_slower_and_faster_again():
    beside = Beside(H100)
    beside.settle(RECENT)
    beside.machine = Machine(0.02, 2 / 9500, 0.0164, 0.0004)
    beside.settle(2 * RECENT)
    assert beside.sizes[-1] == 256 or beside.sizes[-1] == 512
    beside.machine = H100
    beside.settle(4 * RECENT)
    assert beside.sizes[-1] == 1024


def test_lent_time_is_earned_again_before_the_next_chunk():
    beside = Beside(H100)
    beside.settle()
    for _ in range(100):
        beside.step()
    beside.budget.debit(0.5)
    assert beside.steps_until(Waiting(300)) * beside.machine.decode(8) * SHARE[True] >= 0.4


def test_a_new_batch_owes_nothing_of_what_others_waited_for():
    beside = Beside(H100)
    beside.settle()
    beside.budget.debit(10.0)
    assert beside.budget.choose([Waiting(300)], 0, beside.now) is not None
    assert beside.budget.choose([Waiting(300)], 1, beside.now) is not None


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_load_of_prompts_is_served_soon_and_smoothly(seed: int, joined: bool):
    """48 requests of 8 clients on an H100: total, first tokens, gaps and what is left of the speed."""
    found = served(H100, PrefillBudget(True), load(seed), joined=joined)
    assert found.total <= 1.4 * found.alone
    assert median(found.first) <= 1.5 and max(found.first) <= 6.0
    assert found.gap <= MAX_GAP and max(found.slowdown) <= 3.1


def test_chunks_in_the_passes_of_steps_take_less_time():
    for machine in (H100, MEASURED):
        apart, joined = (
            served(machine, PrefillBudget(machine.is_gpu), load(0), joined=how).total for how in (False, True)
        )
        assert joined < 0.97 * apart


def test_a_chunk_and_a_step_in_one_pass_cost_what_the_step_alone_does_not():
    """Sequences keep a third of their speed: every pass of 114 ms is paid for by steps of 9.6 ms."""
    beside = Beside(H100)
    beside.settle()
    beside.budget.joined(1016, 0.114, True)
    alone = H100.decode(8)
    steps = beside.steps_until(Waiting(10**6))
    assert 0.114 - alone <= SHARE[True] * alone * (steps + 1) + MAX_GAP
    for _ in range(20):
        beside.budget.joined(1016, 0.114, True)
    assert beside.steps_until(Waiting(10**6)) >= 20 * (0.114 - alone) / (SHARE[True] * alone) - 40


def test_a_load_on_a_cpu_keeps_the_ratio():
    found = served(CPU, PrefillBudget(False), load(0, 24, (50, 600), 120), 4)
    assert median(found.slowdown) <= 1.31
