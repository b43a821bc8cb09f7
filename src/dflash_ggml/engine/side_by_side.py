"""A step of several sequences: one draft pass, a tree each, one pass that verifies them all, one commit.

It is the step of one sequence (step.py) in the same order; what differs is that plans are made for all together, and that columns
of the pass, and of the features, are dealt out. A sequence whose tree is its root alone is committed by the pass itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from ..decode.accept import Accepted, followed
from ..decode.account import PATIENCE, RUN, Account
from ..decode.candidates import Candidates, NoNumbers
from ..decode.company import Member
from ..decode.costs import Costs
from ..decode.forest import Forest
from ..decode.joint_costs import JointCosts, JointPass
from ..decode.merged import Merged, observe
from ..decode.plan import Plan
from ..decode.reduced import ReducedRows, Watch
from ..decode.sequence import Sequence
from ..decode.together import Together
from ..decode.tree import Tree, root_only
from ..drafts.drafter import Drafter
from ..errors import as_exception
from ..ggml.graph import Graph
from .clock import Clock
from .passes import TargetPasses
from .step import Run, Step, Stepper


class SideBySide(Stepper):
    """Steps sequences of any lanes, several in one pass."""

    def __init__(self, passes: TargetPasses, drafter: Drafter | None, costs: Costs) -> None:
        super().__init__(passes, drafter, costs)
        self.joint = JointCosts(costs)
        is_gpu = passes.device.is_gpu
        account = Account(patience=PATIENCE) if is_gpu else Account(RUN)
        self.together = Together(drafter.depth if drafter else 0, passes.most_columns, account)
        # of the last step of several: the milliseconds of what was done behind it, and whether it was plain
        self._learning, self._was_plain = 0.0, False

    def step_each(
        self, runs: Items[Run], others: Items[Sequence] = (), plain: bool = False
    ) -> list[Step | Exception]:
        """One step of each run; the error of those that failed alone, whose texts are as they were before it, or, without a
        pending token, one token further. others: sequences that are not stepped now. plain: nothing is drafted."""
        if len(runs) < 2:
            self.together.catch_up()
        if len(runs) == 1 and not runs[0].sequence.lane:
            if self.drafter is not None:  # its features come to lie where theirs may be
                self.drafter.take_in_each([s for s in others if s.unseen])
            return [_caught(self, runs[0], plain)]
        if len(runs) > 1 and not self.passes.takes_several:
            several = [self.step_each([run], [*others, *(r.sequence for r in runs)], plain) for run in runs]
            return [step for steps in several for step in steps]
        return self._step_all(runs, others, plain)

    def _step_all(self, runs: Items[Run], others: Items[Sequence], plain: bool) -> list[Step | Exception]:
        sequences, clock, before = [run.sequence for run in runs], Clock(), self.passes.graphs.cold
        plans = [Plan("plain", 0) for _ in runs] if plain else self._plans(runs)
        clock.lap("tree")
        trees = self._trees(runs, plans, clock)
        if len(runs) > 1:
            trees = self.together.share(trees)
        forest = Forest.of(sequences, trees)
        columns = self._columns(forest, others)
        watches = [self._watch(run, tree.tokens) for run, tree in zip(runs, trees)]
        clock.lap("tree")
        drafted = self.passes.graphs.cold
        graph = self._verify(forest, watches, columns)
        if len(runs) > 1:
            clock.lap("verify")
            self.together.meanwhile()
            clock.lap("verify" if self.passes.device.is_gpu else "tree")  # elsewhere the pass is over by now
        choices, reduced = self._read(runs, graph, watches)
        alone = [s for s, width in zip(sequences, forest.widths) if width == 1]
        for sequence in alone:
            assert sequence.pending is not None
            sequence.tokens.append(sequence.pending)
            sequence.pending = None
        clock.lap("verify")
        came = self._walks(runs, graph, forest, choices, reduced, watches)
        clock.lap("host")
        self._commit(forest, [what for what, _ in came], columns)
        clock.lap("commit")
        usual = self.passes.graphs.cold == before
        if self.passes.graphs.cold == drafted:
            self._learn_costs(forest, plans, clock)
        self._was_plain = all(plan.kind == "plain" for plan in plans)
        ms = clock.times.total + self._learning
        self._observe(runs, trees, [what for what, _ in came], ms, usual)
        self._learning = clock.lap("host")
        done = [
            what if isinstance(what, Exception) else self._step_of(run, plan, tree, what, rows, clock)
            for run, plan, tree, (what, rows) in zip(runs, plans, trees, came)
        ]
        # while a GPU is at the commit: what the next trees will be asked for once they have candidates
        for run, plan in zip(runs, plans):
            if (
                plan.kind != "plain"
                and run.copies
                and run.finish is None
                and run.sequence.pending is not None
            ):
                run.copies.look_up(run.sequence)
        return done

    # ---- before the pass

    def _plans(self, runs: Items[Run]) -> list[Plan]:
        """How to decode each run now."""
        if len(runs) > 1:
            return self.together.next([Member(run.sequence, run.controller) for run in runs], self.joint)
        (run,) = runs
        if run.sequence.undraftable or (self.drafter is None and run.copies is None):
            return [Plan("plain", 0)]
        return [run.controller.next(run.sequence, self.costs)]

    def _trees(self, runs: Items[Run], plans: Items[Plan], clock: Clock) -> list[Tree]:
        """The tree of each run, which is its root alone where nothing is drafted or found."""
        drafted = self._draft(runs, plans, clock)
        trees = []
        for run, plan, found in zip(runs, plans, drafted):
            assert run.sequence.pending is not None
            tree, copied = None, None
            if plan.kind != "plain" and run.copies is not None:
                copied = run.copies.look_up(run.sequence)
            try:
                if copied is not None and run.copies is not None:
                    tree = plan.build(run.sequence.pending, Merged(found, copied, run.copies.rates))
                elif found is not None:
                    tree = plan.build(run.sequence.pending, found)
            except NoNumbers:
                self._give_up_drafting(run.sequence)
            trees.append(root_only(run.sequence.pending) if tree is None else tree)
        return trees

    def _draft(self, runs: Items[Run], plans: Items[Plan], clock: Clock) -> list[Candidates | None]:
        """The draft's candidates for each run that it is asked for, from one pass where the draft can."""
        asked = [
            i
            for i, (run, plan) in enumerate(zip(runs, plans))
            if self.drafter and plan.kind != "plain" and plan.drafts and not run.sequence.undraftable
        ]
        found: list[Candidates | None] = [None] * len(runs)
        if not asked or self.drafter is None:
            return found
        cold, depths = self.passes.graphs.cold, [plans[i].depth for i in asked]
        depth = None if None in depths else max(d or 0 for d in depths)
        sequences = [runs[i].sequence for i in asked]
        proposed = self.drafter.propose_each(sequences, max(plans[i].budget for i in asked), depth)
        for i, candidates in zip(asked, proposed):
            if isinstance(candidates, NoNumbers):
                self._give_up_drafting(runs[i].sequence)
            else:
                found[i] = candidates
        clock.lap("draft")
        if self.passes.graphs.cold == cold and len(runs) > 1:  # of one text of several too
            columns = ((depth or self.drafter.depth) + 1) * len(asked)
            self.joint.measured("draft", clock.times.draft, columns, len(asked), _mean_context(sequences))
        return found

    def _columns(self, forest: Forest, others: Items[Sequence]) -> list[int]:
        """Columns of the features that no token waits in which the draft has not seen, one for each of the pass."""
        if self.drafter is None or not self.drafter.taps:
            return []
        features, everyone = self.passes.state.features, [*forest.sequences, *others]
        taken = {column for s in everyone for column in s.unseen}
        crowded = any(len(s.unseen) > self.drafter.depth for s in everyone)
        if crowded or features.width - len(taken) < forest.width:
            self.drafter.take_in_each([s for s in everyone if s.unseen])
            taken = set()
        return features.all_free(taken)[: forest.width]

    # ---- the pass and what came of it

    def _verify(self, forest: Forest, watches: list[Watch | None], columns: list[int]) -> Graph:
        for sequence, width in zip(forest.sequences, forest.widths):
            sequence.torn = width == 1  # until what came of the pass that commits it is known
        return self.passes.verify_each(forest, watches, columns)

    def _read(
        self, runs: Items[Run], graph: Graph, watches: Items[Watch | None]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What is read of a pass: the choices where a run wants them, and reduced rows."""
        wanted = any(run.sampler.greedy and not run.keep_rows for run in runs)
        choices = self.passes.choices(graph) if wanted else None
        reduced = self.passes.reduced_rows(graph) if any(watches) else None
        if choices is None and reduced is None:
            self.passes.device.synchronize()
        return choices, reduced

    def _walks(
        self,
        runs: Items[Run],
        graph: Graph,
        forest: Forest,
        choices: np.ndarray | None,
        reduced: np.ndarray | None,
        watches: Items[Watch | None],
    ) -> list[tuple[Accepted | Exception, list[np.ndarray]]]:
        """`_walk` of each run. Choices are taken apart once for all: array by array numpy's calls take longer than the walks."""
        said = [] if choices is None else choices[: forest.used].tolist()
        lists = None
        if said and min(said) > 0:  # else there may be rows without numbers
            lists = forest.parents.tolist(), forest.tokens.tolist(), said
        return [
            self._walk(run, graph, tree, block, choices, reduced, watch, lists)
            for run, (_, tree, block), watch in zip(runs, forest.blocks, watches)
        ]

    def _walk(
        self,
        run: Run,
        graph: Graph,
        tree: Tree,
        block: slice,
        choices: np.ndarray | None,
        reduced: np.ndarray | None,
        watch: Watch | None,
        lists: tuple[list[int], list[int], list[int]] | None,
    ) -> tuple[Accepted | Exception, list[np.ndarray]]:
        """Walk a run's tree; also the logits behind its tokens, if they are kept. The error is its sampler's.

        lists: parents, tokens and choices of all columns, if all are of numbers."""
        rows: list[np.ndarray] = []
        try:
            if watch is None and lists is not None and run.sampler.greedy and not run.keep_rows:
                parents, tokens, said = lists
                return followed(parents[block], tokens[block], said[block], run.emit), rows
            found: np.ndarray | ReducedRows = np.empty(0, np.int32)
            if watch is not None and reduced is not None:
                found = ReducedRows(reduced[block], watch, self.passes.target.n_vocab)
            elif choices is not None:
                found = choices[block]
            start = run.sequence.n_tokens - (tree.width == 1)
            return self._accept(run, tree, graph, found, rows, start, block.start), rows
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a sampler's processors are anybody's
            if tree.width == 1:
                run.sequence.logits = self.passes.logits_row(graph, block.start)
            return as_exception(error), rows

    def _commit(self, forest: Forest, came: Items[Accepted | Exception], columns: list[int]) -> None:
        """Take in the accepted paths, those of one column in words only."""
        paths: list[tuple[int, ...]] = []
        for (sequence, _, block), width, what in zip(forest.blocks, forest.widths, came):
            accepted = None if isinstance(what, Exception) else what
            paths.append(() if accepted is None or width == 1 else accepted.path)
            sequence.torn = bool(paths[-1])
            if width == 1:
                sequence.pending = None if accepted is None else accepted.tokens[-1]
                self._leave_features(sequence, sequence.unseen, (0,), block, columns)
        self.passes.commit_each(forest, paths)
        for (sequence, _, block), path, what in zip(forest.blocks, paths, came):
            if path and not isinstance(what, Exception):
                waiting = sequence.unseen
                sequence.commit(path, what.tokens)
                self._leave_features(sequence, waiting, path, block, columns)
                sequence.torn = False

    def _leave_features(
        self,
        sequence: Sequence,
        waiting: tuple[int, ...],
        path: tuple[int, ...],
        block: slice,
        columns: list[int],
    ) -> None:
        """Note where the features of a path lie, behind those that wait already."""
        keeps = columns and not sequence.undraftable
        sequence.unseen = (*waiting, *(columns[block.start + node] for node in path)) if keeps else ()

    # ---- what is learned and told

    def _observe(
        self,
        runs: Items[Run],
        trees: Items[Tree],
        came: Items[Accepted | Exception],
        ms: float,
        usual: bool,
    ) -> None:
        accepted = [None if isinstance(what, Exception) else what for what in came]
        for run, tree, what in zip(runs, trees, accepted):
            if what is None or tree.width == 1:
                continue
            if self.drafter is not None:
                self.drafter.observe(run.sequence, what)
            if tree.evidence is not None and run.copies is not None:
                observe(tree, what, run.copies.rates)
        if len(runs) > 1:
            self.together.observe(trees, accepted, ms, usual)
        elif accepted[0] is not None and trees[0].width > 1:
            runs[0].controller.observe(trees[0], accepted[0])

    def _learn_costs(self, forest: Forest, plans: Items[Plan], clock: Clock) -> None:
        """Note what the passes of a step took."""
        times, n, context = clock.times, len(forest.sequences), _mean_context(forest.sequences)
        if all(plan.kind == "plain" for plan in plans):
            # elsewhere the host is still busy with what a wide step gave
            if self._was_plain or self.passes.device.is_gpu:
                self._measured("plain", times.total, n, n, context)
            return
        if all(tree.width == 1 for tree in forest.trees):  # nothing was committed; and it was looked for
            return
        self._measured("verify", times.verify, forest.width, n, context)
        self._measured("commit", times.commit, 1, n)
        self._measured("host", times.tree + times.host, forest.width, n)

    def _measured(self, kind: JointPass, ms: float, columns: int, sequences: int, context: int = 0) -> None:
        """Note a pass of several. What one costs is learned in the first lane alone: elsewhere or beside others it is dearer."""
        if sequences > 1:
            self.joint.measured(kind, ms, columns, sequences, context)

    def _step_of(
        self, run: Run, plan: Plan, tree: Tree, what: Accepted, rows: list[np.ndarray], clock: Clock
    ) -> Step:
        kept = tuple(rows) if run.keep_rows else None
        if tree.width == 1:
            step = Step(what.tokens, "plain", rows=kept, timings=clock.times)
        else:
            step = Step(
                what.tokens,
                "chain" if plan.kind == "chain" else "tree",
                tree,
                what.kept,
                tree.n_nodes,
                what.n_accepted,
                kept,
                timings=clock.times,
                sources=self._uses(tree, what),
            )
        run.sequence.statistics.took(step.tokens, step.n_draft, step.n_accepted)
        step.finish = run.finish
        return step


def _caught(stepper: Stepper, run: Run, plain: bool) -> Step | Exception:
    """A step of one run in the first lane."""
    try:
        step = stepper.step(run, plain=True) if plain else stepper.step(run)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a sampler's processors are anybody's
        return as_exception(error)
    step.finish = run.finish
    return step


def _mean_context(sequences: Items[Sequence]) -> int:
    return sum(s.n_tokens for s in sequences) // len(sequences)
