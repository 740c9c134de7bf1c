"""The world: a policy, a pool of wrapped environments, and what is done with them.

    World(env_name, num_envs, image_shape)
      set_policy ─ collect ─► a buffer or a dataset
                 └ evaluate ─► success rate, videos

Not here: the loop (rollout.py), recording (collecting.py), scoring (evaluating.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringmap.arguments import positive, whole
from ringmap.errors import InputError, RingmapError
from ringmap.fleet.pace import Pace
from ringmap.fleet.weights import Weights
from ringmap.formats.common.refusals import Drop
from ringmap.formats.media.images import resample_of
from ringmap.world.collecting import DEFAULT_FORMAT, Recorder, kept_seeds, to_path, to_writer
from ringmap.world.policies import FunctionPolicy
from ringmap.world.pool import EnvPool, options_of
from ringmap.world.progress import identity_of
from ringmap.world.rollout import Stage, Turn, bar_of, count_of
from ringmap.world.wrappers import MegaWrapper, shape_of

__all__ = ["World", "make_env"]

Array = np.ndarray[Any, np.dtype[Any]]


def make_env(
    env_name: str,
    max_episode_steps: int | None,
    pre_wrappers: Sequence[Any],
    wrapped: Mapping[str, Any],
    extra_wrappers: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """Make one environment of a world."""
    import gymnasium

    from ringmap.world.envs import register

    register()
    try:
        env = gymnasium.make(env_name, max_episode_steps=max_episode_steps, **options)
    except RingmapError:
        raise
    except gymnasium.error.UnregisteredEnv as error:
        raise InputError(
            f"World: no environment {env_name!r} is registered: {error}; import the package that registers it"
        ) from error
    for wrap in pre_wrappers:
        env = wrap(env)
    env = MegaWrapper(env, **wrapped)
    for wrap in extra_wrappers:
        env = wrap(env)
    return env


class World(Stage):
    """Drives a policy through several environments of one kind.

    Args:
        env_name: Gymnasium id.
        num_envs: N, how many.
        image_shape: (H, W) to which pixels and goal are resized; may be left out with `add_pixels=False`.
        max_episode_steps: truncate an episode after so many steps.
        goal_conditioned: treat the info `goal` as a goal, with `goal_transform`.
        extra_wrappers: factories of wrappers, applied after `MegaWrapper`.
        image_transform: applied to the pixels of each environment.
        goal_transform: applied to the goal's picture.
        image_resample: PIL's filter, by name or constant; None: bilinear.
        pre_wrappers: factories of wrappers, applied before `MegaWrapper`.
        add_pixels: render into the infos.
        workers: processes that step the environments; 0 steps them in this one. Same seeds, same results.
        context: how worker processes start; None: Python's default.
        kwargs: for `gymnasium.make`; `render_mode` is "rgb_array" unless said otherwise, or without pixels.

    Attributes:
        envs: the `EnvPool`.
        infos: stacked infos of the last reset or step: arrays `(N, 1, ...)`, lists of N for the rest.
        rewards, terminateds, truncateds: of the last step, `(N,)`.
        policy: the policy, or None.

    Raises:
        InputError: an argument is wrong, or there is no such environment.
        MissingExtraError: the environment's package is not installed.

    Processes and threads: one thread at a time.

    Source: stable-worldmodel, World guide.

    Example:
        >>> import ringmap
        >>> world = World("ringmap/TwoRoom-v1", num_envs=4, image_shape=(32, 32))
        >>> world.set_policy(ringmap.policy.RandomPolicy(seed=0))
        >>> buf = ringmap.ReplayBuffer(max_steps=10_000, history_len=4)
        >>> world.collect(writer=buf, episodes=6, seed=0)
        >>> buf.num_episodes, sorted(buf.get_episode_data()["seed"])
        (6, [0, 1, 2, 3, 4, 5])
        >>> world.close()
    """

    def __init__(
        self,
        env_name: str,
        num_envs: int,
        image_shape: tuple[int, int] | None = None,
        max_episode_steps: int | None = 100,
        goal_conditioned: bool = True,
        extra_wrappers: Sequence[Any] | None = None,
        image_transform: Callable[[Any], Any] | None = None,
        goal_transform: Callable[[Any], Any] | None = None,
        image_resample: str | int | None = None,
        *,
        pre_wrappers: Sequence[Any] | None = None,
        add_pixels: bool = True,
        workers: int = 0,
        context: str | None = None,
        **kwargs: Any,
    ) -> None:
        num_envs = positive("World", "num_envs", num_envs)
        if max_episode_steps is not None:
            max_episode_steps = positive("World", "max_episode_steps", max_episode_steps)
        if image_shape is None and add_pixels:
            raise InputError(
                "World: image_shape=(H, W) says how large the pixels are; it may be left out only with add_pixels=False"
            )
        if image_shape is not None:
            image_shape = shape_of(image_shape, "World: image_shape")
        resample_of(image_resample)
        self.env_name = env_name
        self.num_envs = num_envs
        self.image_shape = image_shape
        self.image_resample = image_resample
        self.goal_transform = goal_transform if goal_conditioned else image_transform
        self.max_episode_steps = max_episode_steps
        self.policy: Any = None
        if add_pixels:
            kwargs.setdefault("render_mode", "rgb_array")
        # Ours checks observations, at a tenth of the cost, and raises instead of warning.
        kwargs.setdefault("disable_env_checker", True)
        wrapped = {
            "image_shape": image_shape,
            "image_transform": image_transform,
            "goal_transform": goal_transform,
            "image_resample": image_resample,
            "separate_goal": goal_conditioned,
            "add_pixels": add_pixels,
        }
        wrappers = tuple(pre_wrappers or ()), wrapped, tuple(extra_wrappers or ())
        recipe = partial(make_env, env_name, max_episode_steps, *wrappers, kwargs)  # can be pickled, for workers
        self.envs = EnvPool([recipe] * num_envs, workers, context=context, name=env_name)

    # -- the environments --------------------------------------------------------------------

    @property
    def infos(self) -> dict[str, Any]:
        """The stacked infos of the last reset or step. They are changed in place by the next one."""
        return self.envs.infos

    @property
    def rewards(self) -> Array:
        """Rewards of the last step, float32 `(N,)`."""
        return self.envs.rewards

    @property
    def terminateds(self) -> Array:
        """Which episodes ended in the last step, bool `(N,)`."""
        return self.envs.terminateds

    @property
    def truncateds(self) -> Array:
        """Which episodes were cut off in the last step, bool `(N,)`."""
        return self.envs.truncateds

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Reset every environment; `infos` shows them, and no flag is set.

        Args:
            seed: environment i gets `seed + i`; or one per environment.
            options: for all, or a list with one per environment.
        """
        self.envs.reset(seed, options)

    def set_policy(self, policy: Any) -> None:
        """Take a policy: an object with `get_action(infos)`, or a function of the infos.

        Its `set_env(envs)` is called, and then `set_seed(seed)` with its own `seed`, as far as it has these.

        Raises:
            InputError: it is neither.
        """
        if not hasattr(policy, "get_action"):
            if not callable(policy):
                raise InputError(
                    f"World.set_policy: expected get_action(infos) or a function, got {type(policy).__name__}"
                )
            policy = FunctionPolicy(policy)
        if hasattr(policy, "set_env"):
            policy.set_env(self.envs)
        if hasattr(policy, "set_seed") and hasattr(policy, "seed"):
            policy.set_seed(policy.seed)
        self.policy = policy

    def close(self) -> None:
        """Close the environments, and end the workers. Closing twice is fine."""
        self.envs.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- rollouts ----------------------------------------------------------------------------

    def collect(
        self,
        path: str | os.PathLike[str] | None = None,
        episodes: int | None = None,
        seed: int | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        format: str = DEFAULT_FORMAT,
        *,
        writer: Any = None,
        progress: bool = True,
        resume: bool = False,
        mode: str | None = None,
        commit_every: int | None = None,
        policy: Any = None,
        weights: Weights | None = None,
        pace: Pace | None = None,
        drop: str | Iterable[str] = (),
    ) -> None:
        """Roll out episodes into a buffer or a dataset.

        An episode of T steps has T + 1 rows: row t has the observation at t and the action taken
        there (NaN in the last row; integers 0); the reward and the flags in it came with that observation
        (row 0: NaN, False). Every info that is an array or text is a column, but for names with a leading
        underscore, and `render_time`. The episode's seed, and what `get_episode_data()` of the
        unwrapped environment returns, are stored as episode data.

        Args:
            path: of a dataset. Or:
            writer: a `ReplayBuffer`, or an open writer of a format.
            episodes: how many. With a seed just the seeds `seed ... seed + episodes - 1`, each once. All
                that are started are finished, so that short ones are not favoured.
            seed: of the first episode.
            options: reset options, for all, or a list with one per environment.
            format: of the dataset; the suffix of `path` decides when none is given (.h5, .zarr, .lance).
            progress: show a progress bar once it takes a while.
            resume: continue with a collection that was killed: the seeds that are missing, each once. Its
                progress is committed with each episode, and stays when the episode is evicted.
            mode: what to do with a dataset at `path`: "append", "overwrite" or "error"; None: "append", or "error" of a
                format that can't (lerobot, minari, robomimic).
            commit_every: commit this many rows of an open episode at a time, as for `ReplayBuffer.begin_episode`: for
                long episodes, or a learner that follows. For a `ReplayBuffer`. What a kill left of an episode is
                dropped by `resume` before its seed is played again; in a buffer with `interrupted="keep"` it stays, and
                its seed counts as played.
            policy: set first, as by `set_policy`; None: the one that is set.
            weights: where a learner publishes the policy: the newest is loaded into `weights.model`, or into the policy
                if it is a `torch.nn.Module`, or into the model of a `FeedForwardPolicy`, whenever an episode begins.
                Each episode has `policy_step` in its data: the step of the weights that chose its first action, -1 if
                none were published. With several environments, later actions may come from newer ones.
            pace: wait before a commit while the collectors are too far ahead of the learners. For a `ReplayBuffer` in
                its directory.
            drop: names of columns, and of data of episodes, to leave out. What a format can't hold has to be here, but
                for `seed` and `policy_step`, which are left out where there is no place for them.

        Raises:
            RoleError: no policy is set.
            InputError: both or neither of path and writer; resume without a seed, or of a collection that
                differs; `weights` of another model; a buffer that `pace` does not count, or a commit that its slack is
                less than; the policy's actions do not fit; the writer refuses an episode. What was collected before
                stays.
            RolloutError: an environment raised or broke its contract, or a worker died; so with this.
            CorruptError, EnvironmentFault: the published weights are damaged, or can't be read; so with this.

        Cost: the environments', the policy's, and one commit per episode, or per `commit_every` rows. Memory: the open
        episodes, or
            with `commit_every` their newest rows.

        Processes and threads: other processes may read the buffer meanwhile.
        """
        where = "World.collect"
        left_out = kept_seeds(drop, where) if resume else Drop(drop, where)
        if (path is None) == (writer is None):
            raise InputError(f"{where}: pass exactly one of path= (a dataset) and writer= (a buffer or a writer)")
        count = count_of(episodes, where)
        first = None if seed is None else whole(where, "seed", seed)
        identity = None
        if resume:
            if first is None:
                raise InputError(f"{where}: resume=True needs a seed: it tells the episodes apart")
            if not (options is None or isinstance(options, Mapping)):
                raise InputError(
                    f"{where}: resume=True with options for each environment: which one plays which seed depends on "
                    "the kills; pass one dict for all"
                )
            identity = identity_of(self.env_name, first, count, options)
        if policy is not None:
            self.set_policy(policy)
        self.check_ready(where)
        given = options_of(options, self.num_envs, where)
        recorder = Recorder(self, writer, commit_every, weights, pace, left_out)
        sink = to_writer(writer, identity) if path is None else to_path(path, format, identity, mode)
        offsets = range(count) if sink.progress is None else sink.progress.missing()
        turns = (Turn(k, None if first is None else first + k, given) for k in offsets)
        with bar_of(f"collect {self.env_name}", count, progress, count - len(offsets)) as bar:
            if offsets:
                recorder.record(turns, sink, lambda turn: bar.update())

    def evaluate(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        video: str | os.PathLike[str] | None = None,
        reset_mode: str | None = None,
        dataset: Any = None,
        episodes_idx: Sequence[int] | None = None,
        start_steps: Sequence[int] | None = None,
        goal_offset: int | None = None,
        eval_budget: int | None = None,
        callables: Sequence[Mapping[str, Any]] | None = None,
        *,
        progress: bool = True,
    ) -> dict[str, Any]:
        """Run the policy, and say how often it succeeds.

        Success is `info["is_success"]` at the end of an episode, or `terminated` where there is none.

        Args:
            episodes: how many fresh ones; all that are started are finished.
            seed: of the first; episode k gets `seed + k`.
            options: reset options, for all, or a list with one per environment.
            video: a folder for an mp4 of each: `episode_<k>.mp4`, or `env_<i>.mp4` with three panels from a
                dataset (agent, dataset, goal).
            reset_mode: "auto" continues with the next episode where one ended, "wait" plays one in each
                environment. Default: "auto", and "wait" from a dataset.
            dataset: run from its states: any dataset, or a buffer. Open it without a transform.
            episodes_idx: its episodes, one per environment.
            start_steps: where each begins.
            goal_offset: the goal is what the episode held so many steps later. Policies see it, held fixed,
                as `goal` (the pixels) and `goal_<column>`.
            eval_budget: most steps per episode; `max_episode_steps` counts as well.
            callables: calls on each unwrapped environment after its reset, where it has no
                `reset_options_from_dataset(init, goal)`: `{"method": name, "args": {name: {"value": ...,
                "in_dataset": bool}}}`; with `in_dataset`, value names a column of the first row, or
                `goal_<column>`.
            progress: show a progress bar once it takes a while.

        Returns:
            `success_rate` (percent), `episode_successes` (bool), `episode_returns`, `episode_lengths`
            (arrays by episode), `seeds` (list, None without a seed).

        Raises:
            RoleError: no policy is set.
            InputError: neither episodes nor dataset, or both; an argument does not fit.
            RolloutError: an environment raised or broke its contract, or a worker died.
            MissingExtraError: a video, and PyAV is not installed.
        """
        from ringmap.world.evaluating import fresh_turns, score
        from ringmap.world.tasks import Tasks

        if (episodes is None) == (dataset is None):
            raise InputError(
                "World.evaluate: pass episodes= (fresh ones) or dataset= (from its states), and only one of them"
            )
        first = None if seed is None else whole("World.evaluate", "seed", seed)
        tasks = None
        if dataset is None:
            turns = fresh_turns(self, episodes, first, options, reset_mode)
        else:
            tasks = Tasks(self, dataset, episodes_idx, start_steps, goal_offset, eval_budget, reset_mode, callables)
            turns = tasks.turns(first, options)
        seeds = None if first is None else [turn.seed for turn in turns]
        return {**score(self, turns, video, progress, tasks), "seeds": seeds}
