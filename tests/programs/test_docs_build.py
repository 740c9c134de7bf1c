import inspect
import re
import shutil

import pytest

import ringmap
from ringmap.buffers.view import BufferView
from ringmap.data import DistillationBuffer, OfflineToOnlineReplayBuffer, ShardedReplayBuffer
from tests import ROOT
from tests.house import PYTHON, run


def build(root, site):
    run(PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", site, cwd=root)


CLASSES = (
    ringmap.ReplayBuffer,
    ringmap.TransitionReplayBuffer,
    ringmap.RolloutBuffer,
    DistillationBuffer,
    OfflineToOnlineReplayBuffer,
    ShardedReplayBuffer,
    BufferView,
    ringmap.Pace,
    ringmap.Weights,
    ringmap.ReplayBufferCollectionWrapper,
)
OURS = {
    *("episode_ring", "holds_episodes", "items_at", "mix_source", "recorded_by", "ring_paths"),
    *("begin_pass", "view_at", "move_to"),
    *("are_stored", "asked", "at", "marked_ring", "of", "positions", "ranges", "redraw", "redraw_here"),
    "buffer_swap",
}
"""What our own classes ask one another, and the other name of a method."""
REFUSED = {"add", "begin_episode", "clear", "extend", "extend_from", "write_episode", "write_episodes", "write_joined"}
"""What a buffer of rings only refuses."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = tmp_path_factory.mktemp("site")
    build(ROOT, made)  # without a warning
    return made


def test_docs_build_without_a_warning(site):
    assert (site / "index.html").is_file()


def entries(site):
    """Return class and name of each member that a page of the reference has."""
    pages = [page.read_text() for page in (site / "reference/api").rglob("*.html")]
    return {tuple(one.split(".")[-2:]) for page in pages for one in re.findall(r'id="(ringmap[^"]*)"', page)}


def home(cls, name):
    """Return the name of the class that a member comes from."""
    return next(one for one in cls.__mro__ if name in vars(one)).__name__


def missing(found):
    """Return the public members of classes that stand on no page, neither there nor at the class they come from."""
    return {
        f"{cls.__name__}.{name}"
        for cls in CLASSES
        for name, value in ((name, inspect.getattr_static(cls, name)) for name in dir(cls))
        if isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
        if not (name.startswith("_") or name in OURS or (cls is ShardedReplayBuffer and name in REFUSED))
        if not {(cls.__name__, name), (home(cls, name), name)} & found
    }


def test_each_member_of_a_class_is_on_a_page(site):
    found = entries(site)
    assert missing(found) == set()
    assert missing(found - {("ReplayBuffer", "close")}) == {"ReplayBuffer.close"}  # control: what a base has, too


def test_control(tmp_path):
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/hooks.py", tmp_path / "docs")
    (tmp_path / "docs/index.md").write_text("[gone](gone.md)\n")
    with pytest.raises(AssertionError, match=r"'gone\.md', but the target is not found"):
        build(tmp_path, tmp_path / "site")
