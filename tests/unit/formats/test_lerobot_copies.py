"""Between LeRobot sets pictures and videos are copied as they are stored: no merge loses anything, none decodes."""

import glob
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ringmap.data import convert, get_format, load_dataset, merge
from ringmap.errors import ReplacedError
from ringmap.formats.media import images, videos
from tests.unit.formats.others import later_than
from tests.unit.formats.rlds import unpack

av = pytest.importorskip("av", reason="PyAV is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

HERE = Path(__file__).parent
TOP, LEFT = "observation.images.top", "observation.images.left"


def episode(number):
    rng = np.random.default_rng(number)
    steps = 20 + number
    return {
        TOP: rng.integers(0, 256, (steps, 32, 48, 3), np.uint8),
        LEFT: rng.integers(0, 256, (steps, 7, 9, 3), np.uint8),
        "observation.state": rng.normal(size=(steps, 3)).astype(np.float32),
        "action": rng.normal(size=(steps, 2)),
        "_episode_data": {"task": f"task {number % 2}"},
    }


def write(path, numbers, fps=10):
    with get_format("lerobot").open_writer(path, fps=fps, reward_at="same") as writer:
        writer.write_episodes(map(episode, numbers))


def pictures(path):
    """Return the bytes of each video, and of each picture in the rows, in order."""
    rows = [pq.read_table(file).column(LEFT).to_pylist() for file in sorted(glob.glob(f"{path}/data/*/*.parquet"))]
    films = [Path(file).read_bytes() for file in sorted(glob.glob(f"{path}/videos/{TOP}/*/*.mp4"))]
    return films, [row["bytes"] for table in rows for row in table]


def packets(path, name):
    """Return the bytes of each frame of all videos of a column, by time."""
    found = []
    for file in sorted(glob.glob(f"{path}/videos/{name}/*/*.mp4")):
        with av.open(file) as video:
            found.append([bytes(p) for p in sorted((p for p in video.demux() if p.size), key=lambda p: p.pts)])
    return found


@pytest.fixture
def uncoded(monkeypatch):
    """Let nothing be decoded or encoded, from when it is called on."""

    def fail(*_, **__):
        raise AssertionError("a picture was decoded or encoded")

    def begin():
        monkeypatch.setattr(videos.VideoWriter, "__init__", fail)
        monkeypatch.setattr(videos.Decoder, "read", fail)
        monkeypatch.setattr(images, "in_threads", fail)

    yield begin
    monkeypatch.undo()


def test_three_merges(tmp_path, uncoded, monkeypatch):
    write(tmp_path / "a", [0, 1])
    write(tmp_path / "b", [2])
    stats = load_dataset(tmp_path / "a", layout="HWC", output="numpy").source.stored(1, TOP).stats
    before = [pictures(tmp_path / name) for name in "ab"]
    uncoded()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "1", dest_format="lerobot", progress=False)
    merge([tmp_path / "1"], tmp_path / "2", dest_format="lerobot", progress=False)
    convert(tmp_path / "2", tmp_path / "3", dest_format="lerobot", progress=False)
    assert pictures(tmp_path / "3") == tuple(a + b for a, b in zip(*before, strict=True))
    monkeypatch.undo()
    found = load_dataset(tmp_path / "3", layout="HWC", output="numpy")
    assert found.fps == 10 and found.lengths.tolist() == [20, 21, 22]
    assert found.source.stored(1, TOP).stats == stats
    for number in range(3):
        got, given = found.load_episode(number), episode(number)
        assert got["task"].tolist() == [f"task {number % 2}"] * (20 + number)
        assert np.array_equal(got[LEFT], given[LEFT])
        assert np.array_equal(got["observation.state"], given["observation.state"])
        source, at = ("a", number) if number < 2 else ("b", 0)
        first = load_dataset(tmp_path / source, layout="HWC", output="numpy").load_episode(at)
        assert np.array_equal(got[TOP], first[TOP])


def test_some_episodes_and_fewer_columns(tmp_path, uncoded):
    write(tmp_path / "a", [0, 1, 2])
    uncoded()
    convert(
        tmp_path / "a",
        tmp_path / "b",
        dest_format="lerobot",
        where="episode != 1",
        drop=[LEFT],
        progress=False,
        columns={TOP: "observation.images.above"},
    )
    found = load_dataset(tmp_path / "b")
    assert found.lengths.tolist() == [20, 22] and LEFT not in found.column_names
    all_three = packets(tmp_path / "a", TOP)
    assert packets(tmp_path / "b", "observation.images.above") == [all_three[0], all_three[2]]


@pytest.mark.parametrize("release", sorted(path.stem.removeprefix("lerobot-") for path in HERE.glob("lerobot-*.txt")))
def test_what_a_release_wrote(tmp_path, uncoded, release):
    """Its episodes share one video: each gets its own packets, and AV1 stays AV1."""
    unpack((HERE / f"lerobot-{release}.txt").read_text(), tmp_path / "a")
    uncoded()
    drop = ["language_persistent", "language_events"] if release.startswith("0.6") else []
    for source, dest in ("ab", "bc"):
        convert(
            tmp_path / source,
            tmp_path / dest,
            dest_format="lerobot",
            drop=drop if source == "a" else [],
            progress=False,
        )
    ((*both,),) = packets(tmp_path / "a", TOP)
    made = packets(tmp_path / "c", TOP)
    assert [len(one) for one in made] == load_dataset(tmp_path / "a", keys_to_drop=drop).lengths.tolist()
    assert list(itertools.chain.from_iterable(made)) == both
    assert packets(tmp_path / "b", TOP) == made
    first, last = (load_dataset(tmp_path / name, keys_to_drop=drop, layout="HWC", output="numpy") for name in "ac")
    assert first.source.pictures() == last.source.pictures()


@pytest.mark.parametrize("release", ["0.6.1"])
def test_copies_are_read_alike(tmp_path, release):
    unpack((HERE / f"lerobot-{release}.txt").read_text(), tmp_path / "a")
    drop = ["language_persistent", "language_events"]
    convert(tmp_path / "a", tmp_path / "b", dest_format="lerobot", drop=drop, progress=False)
    first, last = (load_dataset(tmp_path / name, keys_to_drop=drop, layout="HWC", output="numpy") for name in "ab")
    for number in range(len(first.lengths)):
        old, new = first.load_episode(number), last.load_episode(number)
        for name in first.source.pictures():
            assert np.array_equal(old[name], new[name]), name


def test_what_asks_for_another_encoding_gets_it(tmp_path):
    write(tmp_path / "a", [0])
    with_options = {"crf": 40}, {"videos": False}, {"fps": 20, "drop": ["timestamp"]}
    for number, options in enumerate(with_options):
        convert(tmp_path / "a", tmp_path / str(number), dest_format="lerobot", progress=False, **options)
        assert pictures(tmp_path / str(number))[0] != pictures(tmp_path / "a")[0]
    dataset = load_dataset(tmp_path / "a", transform=lambda steps: {**steps, TOP: 255 - steps[TOP]})
    convert(dataset, tmp_path / "turned", dest_format="lerobot", progress=False)
    assert pictures(tmp_path / "turned")[0] != pictures(tmp_path / "a")[0]


@pytest.mark.parametrize("open_gop", [False, True])
def test_frames_that_others_refer_to_are_not_copied_alone(tmp_path, open_gop):
    """With open groups of pictures the last frames before a keyframe need it."""
    path = str(tmp_path / "film.mp4")
    with av.open(path, "w") as film:
        stream = film.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.options = {
            "x264-params": f"open-gop={int(open_gop)}:keyint=6:min-keyint=6:bframes=3:b-adapt=0:scenecut=0"
        }
        picture = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
        for number in range(18):
            film.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(picture, 3 * number, 1))))
        film.mux(stream.encode())
    whole = read_frames(path, range(18))
    for first, count in ((0, 18), (0, 6), (6, 6)):
        part = videos.Decoder(path).packets(first, count)
        assert (part is None) == (open_gop and count == 6)
        if part is not None:
            (tmp_path / "part.mp4").write_bytes(part)
            assert np.array_equal(read_frames(str(tmp_path / "part.mp4"), range(count)), whole[first : first + count])


def read_frames(path, numbers):
    out = np.empty((len(numbers), 48, 64, 3), np.uint8)
    decoder = videos.Decoder(path)
    decoder.read(list(numbers), out)
    decoder.close()
    return out


def streams(path):
    """Return the codec, the rate and the number of frames of each video."""
    found = []
    for file in sorted(glob.glob(f"{path}/videos/{TOP}/*/*.mp4")):
        with av.open(file) as film:
            stream = film.streams.video[0]
            found.append((stream.codec_context.name, int(stream.average_rate), stream.frames))
    return found


def info_of(path):
    return json.loads((Path(path) / "meta" / "info.json").read_text())


def say(path, **of_top):
    """Change what `meta/info.json` says of the videos."""
    info = info_of(path)
    info["features"][TOP] |= of_top
    (Path(path) / "meta" / "info.json").write_text(json.dumps(info))


def test_a_last_row_that_is_no_step_has_no_picture(tmp_path):
    write(tmp_path / "a", [0, 1])
    options = {"dest_format": "lerobot", "reward_at": "next", "drop": ["frame_index"], "progress": False}
    convert(tmp_path / "a", tmp_path / "b", **options)
    found = load_dataset(tmp_path / "b", layout="HWC", output="numpy")
    assert found.lengths.tolist() == [19, 20]
    assert [frames for *_, frames in streams(tmp_path / "b")] == [19, 20]
    assert np.array_equal(found.load_episode(0)[LEFT], episode(0)[LEFT][:19])


def test_a_source_whose_rate_was_said_anew_is_encoded_at_that_rate(tmp_path):
    write(tmp_path / "a", [0])
    source = load_dataset(tmp_path / "a", fps=20)
    convert(source, tmp_path / "b", dest_format="lerobot", drop=["timestamp"], progress=False)
    assert info_of(tmp_path / "b")["fps"] == 20 and streams(tmp_path / "b") == [("h264", 20, 20)]


@pytest.mark.parametrize("place", ["info", "video_info"])
def test_what_is_not_known_of_a_copied_video_is_not_said(tmp_path, place):
    write(tmp_path / "a", [0])
    say(tmp_path / "a", info=None)
    say(tmp_path / "a", **{place: {"video.codec": "of its own"}})
    convert(tmp_path / "a", tmp_path / "b", dest_format="lerobot", progress=False)
    assert info_of(tmp_path / "b")["features"][TOP]["info"] == {"video.codec": "of its own"}
    say(tmp_path / "a", info=None, video_info=None)
    convert(tmp_path / "a", tmp_path / "c", dest_format="lerobot", progress=False)
    assert info_of(tmp_path / "c")["features"][TOP]["info"] == {}


def test_of_videos_of_two_codecs_no_codec_is_said(tmp_path):
    write(tmp_path / "a", [0])
    write(tmp_path / "b", [1])
    (film,) = glob.glob(f"{tmp_path}/b/videos/{TOP}/*/*.mp4")
    with av.open(film, "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for picture in episode(1)[TOP]:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        file.mux(stream.encode())
    said = info_of(tmp_path / "b")["features"][TOP]["info"] | {"video.codec": "mpeg4"}
    say(tmp_path / "b", info=said)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c", dest_format="lerobot", progress=False)
    assert [codec for codec, *_ in streams(tmp_path / "c")] == ["h264", "mpeg4"]
    del said["video.codec"]
    assert info_of(tmp_path / "c")["features"][TOP]["info"] == said


def tables_of(path):
    (file,) = glob.glob(f"{path}/meta/episodes/*/*.parquet")
    return file


def test_a_joined_column_is_copied_as_it_is_now(tmp_path):
    write(tmp_path / "a", [0])
    source = load_dataset(tmp_path / "a", layout="HWC", output="numpy")
    source.merge_col([LEFT, LEFT], LEFT, dim=2)
    convert(source, tmp_path / "b", dest_format="lerobot", progress=False)
    found = load_dataset(tmp_path / "b", layout="HWC", output="numpy").load_episode(0)
    assert np.array_equal(found[LEFT], np.concatenate([episode(0)[LEFT]] * 2, 2))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_videos_and_pictures_do_not_mix(tmp_path, order):
    write(tmp_path / "a", [0])
    with get_format("lerobot").open_writer(tmp_path / "b", fps=10, reward_at="same", videos=False) as writer:
        writer.write_episode(episode(1))
    merge([tmp_path / name for name in order], tmp_path / "c", dest_format="lerobot", progress=False)
    assert sorted(frames for *_, frames in streams(tmp_path / "c")) == [20, 21]
    found = load_dataset(tmp_path / "c", layout="HWC", output="numpy")
    assert found.source.pictures()[TOP] == "video"
    for number, name in enumerate(order):
        assert np.array_equal(found.load_episode(number)[LEFT], episode("ab".index(name))[LEFT])


def test_without_statistics_they_are_counted(tmp_path):
    write(tmp_path / "a", [0])
    want = load_dataset(tmp_path / "a").source.stored(0, LEFT).stats
    table = pq.read_table(tables_of(tmp_path / "a"))
    pq.write_table(table.drop([n for n in table.column_names if n.startswith("stats/")]), tables_of(tmp_path / "a"))
    assert load_dataset(tmp_path / "a").source.stored(0, LEFT).stats == {}
    convert(tmp_path / "a", tmp_path / "b", dest_format="lerobot", progress=False)
    assert load_dataset(tmp_path / "b").source.stored(0, LEFT).stats == want
    assert pictures(tmp_path / "b") == pictures(tmp_path / "a")


def test_an_episode_of_no_steps_is_left_out(tmp_path):
    write(tmp_path / "a", [0, 1])
    rows = pq.read_table(tables_of(tmp_path / "a")).to_pylist()
    rows.append({**rows[-1], "episode_index": 2, "length": 0})
    pq.write_table(pa.Table.from_pylist(rows), tables_of(tmp_path / "a"))
    convert(tmp_path / "a", tmp_path / "b", dest_format="lerobot", progress=False)
    assert load_dataset(tmp_path / "b").lengths.tolist() == [20, 21]
    assert pictures(tmp_path / "b") == pictures(tmp_path / "a")


@pytest.mark.parametrize("name", [TOP, LEFT])
def test_pictures_of_a_set_that_is_written_over_are_not_copied(tmp_path, name, monkeypatch):
    write(tmp_path / "a", [0, 1])
    source = load_dataset(tmp_path / "a").source
    later_than(tmp_path)
    pattern = f"videos/{TOP}/*/*.mp4" if name == TOP else "data/*/*.parquet"
    path = Path(sorted(glob.glob(f"{tmp_path}/a/{pattern}"))[0])
    path.write_bytes(path.read_bytes())
    with pytest.raises(ReplacedError, match="was written since"):
        source.stored(0, name)
    source = load_dataset(tmp_path / "a").source
    source.stored(0, name)
    real = source._refuse_newer

    def write_meanwhile(path):
        real(path)
        later_than(tmp_path)
        Path(tables_of(tmp_path / "a")).write_bytes(Path(tables_of(tmp_path / "a")).read_bytes())

    monkeypatch.setattr(source, "_refuse_newer", write_meanwhile)
    with pytest.raises(ReplacedError, match="another dataset"):
        source.stored(0, name)
    source = load_dataset(tmp_path / "a").source
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ReplacedError, match="not there any more"):
        source.stored(0, name)


def test_packets_leave_the_decoder_as_good_as_new(tmp_path):
    path = str(tmp_path / "film.mp4")
    pictures = (
        np.random.default_rng(0).integers(0, 200, (1, 48, 64, 3), np.uint8)
        + np.arange(24, dtype=np.uint8)[:, None, None, None]
    )
    videos.encode_video(path, pictures, videos.Encoding(lossless=True, fps=10))
    decoder, out = videos.Decoder(path), np.empty((1, 48, 64, 3), np.uint8)
    for number, (first, count) in enumerate([(8, 8), (16, 8), (0, 8), (8, 16)]):
        decoder.read([2 + number], out)
        part = videos.Decoder("part", decoder.packets(first, count))
        decoder.read([3 + number], out)
        assert np.array_equal(out[0], pictures[3 + number])
        got = np.empty((count, 48, 64, 3), np.uint8)
        part.read(list(range(count)), got)
        assert np.array_equal(got, pictures[first : first + count])
    for first, count in [(4, 8), (16, 9), (24, 1), (0, 25), (8, 24)]:  # from between keyframes, or more than there are
        assert decoder.packets(first, count) is None
