"""Monte Carlo tree search over sharding decisions, after AutoMap and PartIR.

A decision is "node i uses a strategy that contains D", where D is a label such as ``tp:h`` (split
factor h over axis tp); problems without labels decide for single strategies.  A decision is
propagated as far as it forces others (PartIR, Alabed et al. 2022; AutoMap, Schaarschmidt et al.
2021): a neighbour keeps only the strategies that its best partners among those left reach without
paying for resharding, if there are any that also take their share of a split, and so on through
the graph.  A rollout decides what stays open in the same way, heavy nodes first.

The tree is searched by UCT (Kocsis & Szepesvari 2006):

    argmax_a  mean reward(a) + c sqrt(ln N / n_a),   reward = 1 - (cost - best) / (worst - best)

Actions are the decisions of the undecided nodes whose choice matters most, and "stop".  One
evaluation is one node of one rollout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import Ints, Problem
from autopar.searchers.descent import Neighbourhood, make_fit, polish
from autopar.searchers.gather import Lift, tidy_memory
from autopar.searchers.model import Floats, Model, from_problem
from autopar.searchers.run import Run
from autopar.searchers.starts import prepare, trivial_bound

ROLLOUTS = 400  # when there is no budget
DEPTH = 12  # decisions in a row
NODES = 8  # undecided nodes whose decisions are offered
EXPLORE = 0.5
NOISE = 0.2  # of the spread of a node's costs, in every other decision of a rollout
PROMISING = 1.1  # times the best: rollouts up to there are polished

Mask = npt.NDArray[np.bool_]
Decision = tuple[int, str]


@dataclass
class State:
    """A node of the search tree: what is still allowed, and how its actions did."""

    allowed: Mask
    actions: list[Decision] = field(default_factory=list)
    children: dict[Decision, State] = field(default_factory=dict)
    visits: int = 0
    reward: float = 0.0


def search(run: Run, seed: int) -> None:
    """See the module; meant for problems of up to some thousand nodes."""
    if run.problem.labels is None:
        ready = prepare(run)
        if ready is not None:
            _Tree(run, ready.model, ready.lift, seed).grow()
    else:  # decisions are about the nodes as they are
        m = tidy_memory(from_problem(run.problem))
        run.bound(trivial_bound(m), "cheapest strategies")
        if np.isfinite(run.lower_bound):  # else some node has no strategy that is allowed
            _Tree(run, m, lambda x: x, seed).grow()


class _Tree:
    def __init__(self, run: Run, m: Model, lift: Lift, seed: int) -> None:
        self.run, self.model, self.lift = run, m, lift
        self.near = Neighbourhood(m)
        self.random = np.random.default_rng(seed)
        self.contains = _decisions(run.problem, m)
        self.weight = self._weights()
        self.cheap = self._cheap()
        self.best, self.worst = math.inf, -math.inf
        self.best_path: tuple[Decision, ...] = ()

    def grow(self) -> None:
        m = self.model
        root = State(np.isfinite(m.unary))
        limited = self.run.budget.evaluations is not None or self.run.budget.wall_s is not None
        rollouts = 0
        while (limited or rollouts < ROLLOUTS) and not self.run.closed:
            rollouts += 1
            path, decisions = [root], []
            while len(path) <= DEPTH:
                state = path[-1]
                if not state.actions:
                    state.actions = self._actions(state.allowed)
                if not state.actions:
                    break
                action = self._choose(state)
                decisions.append(action)
                if action not in state.children:
                    state.children[action] = State(self._decide(state.allowed, action))
                    path.append(state.children[action])
                    break
                path.append(state.children[action])
            cost = self._rollout(path[-1].allowed, tuple(decisions))
            self._reward(path, cost)
            self.run.spend(max(m.num_vars, 1))

    def _choose(self, state: State) -> Decision:
        for action in state.actions:
            if action not in state.children:
                return action
        log = math.log(state.visits + 1)

        def value(action: Decision) -> float:
            child = state.children[action]
            return child.reward / child.visits + EXPLORE * math.sqrt(log / child.visits)

        return max(state.actions, key=value)

    def _reward(self, path: list[State], cost: float) -> None:
        if math.isfinite(cost):
            self.worst = max(self.worst, cost)
        span = max(self.worst - self.best, 1e-9 * abs(self.best), 1e-9)
        reward = 1.0 - min((cost - self.best) / span, 1.0) if math.isfinite(cost) else -1.0
        for state in path:
            state.visits += 1
            state.reward += reward

    def _actions(self, allowed: Mask) -> list[Decision]:
        """Decisions of the heaviest undecided nodes, in random order."""
        m = self.model
        count = np.add.reduceat(allowed, m.start[:-1]) if m.num_vars else np.zeros(0)
        undecided = np.flatnonzero(count > 1)
        heavy = undecided[np.argsort(-self.weight[undecided], kind="stable")][:NODES]
        actions = []
        for v in heavy.tolist():
            names = sorted({d for s in self._open(allowed, v) for d in self.contains[s]})
            for name in names:
                inside = sum(name in self.contains[s] for s in self._open(allowed, v))
                if inside < count[v]:
                    actions.append((v, name))
        return [actions[i] for i in self.random.permutation(len(actions))]

    def _open(self, allowed: Mask, v: int) -> list[int]:
        lo, hi = self.model.start[v], self.model.start[v + 1]
        return [int(s) for s in lo + np.flatnonzero(allowed[lo:hi])]

    def _decide(self, allowed: Mask, decision: Decision) -> Mask:
        v, name = decision
        allowed = allowed.copy()
        for s in self._open(allowed, v):
            allowed[s] = name in self.contains[s]
        self._propagate(allowed, [v])
        return allowed

    def _propagate(self, allowed: Mask, changed: list[int]) -> None:
        """Neighbours keep the strategies that need no resharding, where some do."""
        m = self.model
        while changed:
            v = changed.pop()
            mine = allowed[m.start[v] : m.start[v + 1]]
            for w, by_other in self.near.near[v]:
                theirs = allowed[m.start[w] : m.start[w + 1]]
                # near[v] lists (w, matrix with rows = labels of w).
                cost = np.where(mine, by_other, np.inf).min(axis=1)
                free = theirs & (cost <= by_other.min(axis=1)) & (cost <= by_other.min())
                free &= self.cheap[m.start[w] : m.start[w + 1]]
                if free.any() and not free[theirs].all():
                    allowed[m.start[w] : m.start[w + 1]] = free
                    changed.append(w)

    def _rollout(self, allowed: Mask, decisions: tuple[Decision, ...]) -> float:
        """Complete, make it fit, polish within what is allowed, and offer the result."""
        m = self.model
        allowed = self._play_on(allowed)
        unary = np.where(allowed, m.unary, np.inf)
        x = self._complete(unary)
        fitted = make_fit(m, x, unary, self.run.tick)
        if fitted is None or not np.isfinite(m.cost(fitted)):
            return math.inf
        if m.cost(fitted) <= PROMISING * self.best:
            fitted = polish(m, fitted)
        cost = m.cost(fitted)
        if cost < self.best:
            self.best, self.best_path = cost, decisions
            self.run.offer(self.lift(fitted), " ".join(f"{v}={d}" for v, d in decisions))
        return cost

    def _play_on(self, allowed: Mask) -> Mask:
        """Decides what is open, heavy nodes first, each for what looks cheapest, and propagates."""
        m = self.model
        allowed = allowed.copy()
        order = np.argsort(-self.weight * self.random.uniform(0.5, 1.0, m.num_vars))
        for v in order.tolist():
            lo, hi = m.start[v], m.start[v + 1]
            if allowed[lo:hi].sum() < 2:
                continue
            self.run.tick()
            score = np.where(allowed[lo:hi], m.unary[lo:hi], np.inf)
            for w, by_other in self.near.near[v]:
                theirs = allowed[m.start[w] : m.start[w + 1]]
                score = score + by_other[theirs].min(axis=0)
            finite = score[np.isfinite(score)]
            spread = float(np.ptp(finite)) if len(finite) else 0.0
            noise = self.random.exponential(NOISE, hi - lo) * self.random.integers(0, 2)
            pick = int((score + noise * spread).argmin())
            allowed[lo:hi] = False
            allowed[lo + pick] = True
            self._propagate(allowed, [v])
        return allowed

    def _complete(self, unary: Floats) -> Ints:
        m = self.model
        x = np.array(
            [int(unary[lo:hi].argmin()) for lo, hi in zip(m.start[:-1], m.start[1:], strict=True)],
            np.int64,
        )
        for _ in range(3):
            before = x.copy()
            self.run.tick()
            for v in range(m.num_vars):
                x[v] = int(self.near.costs(v, x, unary).argmin())
            if (before == x).all():
                break
        return x

    def _cheap(self) -> Mask:
        """Strategies that take their share of a split: in the lowest quarter of the node's costs.

        What leaves all ranks with the whole work costs nothing on the edges either, and would
        otherwise be propagated through the whole graph.
        """
        m = self.model
        cheap = np.zeros(len(m.unary), bool)
        for lo, hi in zip(m.start[:-1].tolist(), m.start[1:].tolist(), strict=True):
            costs = m.unary[lo:hi]
            finite = costs[np.isfinite(costs)]
            if len(finite):
                cheap[lo:hi] = costs <= finite.min() + 0.25 * np.ptp(finite)
        return cheap

    def _weights(self) -> Floats:
        """How much a node's choice can change: the spread of its own costs."""
        m = self.model
        weight = np.zeros(m.num_vars)
        for v in range(m.num_vars):
            costs = m.unary[m.start[v] : m.start[v + 1]]
            costs = costs[np.isfinite(costs)]
            weight[v] = np.ptp(costs) if len(costs) else 0.0
        return weight


def _decisions(problem: Problem, m: Model) -> list[frozenset[str]]:
    """Per strategy what it decides: its labels, or else its number."""
    if problem.labels is not None:
        return [frozenset(labels) or frozenset({"whole"}) for labels in problem.labels]
    return [frozenset({str(k)}) for size in m.sizes for k in range(size)]
