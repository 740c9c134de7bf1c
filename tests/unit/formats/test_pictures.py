"""What a picture is, by its header: each kind of file in each format, against bytes made here; nothing is narrowed."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from ringmap.data import get_format, load_dataset
from ringmap.errors import CorruptError, InputError, UnsupportedError
from ringmap.formats.media import images, videos
from ringmap.formats.rlds import Leaf, decode

rng = np.random.default_rng(0)
WIDE = rng.integers(0, 1 << 16, (6, 5, 4), np.uint16)
WIDE[0, :2, 0] = 0, 65535
NARROW = (WIDE >> 8).astype(np.uint8)
FLOAT = rng.normal(size=(6, 5, 1)).astype(np.float32)
FLOAT[0, :3, 0] = np.nan, np.inf, -0.0


# -- files made by hand ---------------------------------------------------------------------------


def png(values, kind, bits, palette=b""):
    """Return a PNG of (H, W, n) samples: kind 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGBA."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, _ = values.shape
    rows = b""
    for row in values.reshape(height, -1):
        if bits == 16:
            data = row.astype(">u2").tobytes()
        else:
            ones = "".join(f"{value:0{bits}b}" for value in row.tolist())
            ones += "0" * (-len(ones) % 8)
            data = bytes(int(ones[at : at + 8], 2) for at in range(0, len(ones), 8))
        rows += b"\0" + data
    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    plte = chunk(b"PLTE", palette) if palette else b""
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + plte + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def tiff(values, order="<", photometric=1, sample=None, frames=1, more=()):
    """Return a TIFF of (H, W, n) samples of the array's dtype, in one strip."""
    height, width, channels = values.shape
    data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder(order)).tobytes()
    made = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(data)) + data
    sample = sample or {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    bits = 8 * values.dtype.itemsize
    for frame in range(frames):
        at = len(made)
        tags = [
            (256, 4, width),
            (257, 4, height),
            (258, 3, bits),
            (259, 3, 1),
            (262, 3, photometric),
            (273, 4, 8),
            (277, 3, channels),
            (278, 4, height),
            (279, 4, len(data)),
            *more,
            (339, 3, sample),
        ]
        after = at + 2 + 12 * len(tags) + 4
        body = struct.pack(order + "H", len(tags))
        for tag, kind, value in tags:
            count = channels if tag in (258, 339) else 1
            if count > 2:  # three shorts do not fit into an entry
                body += struct.pack(order + "HHII", tag, 3, count, after + (6 if tag == 339 else 0))
            elif kind == 3:
                body += struct.pack(order + "HHIHH", tag, 3, count, value, value if count == 2 else 0)
            else:
                body += struct.pack(order + "HHII", tag, kind, count, value)
        extra = struct.pack(order + "6H", *[bits] * 3, *[sample] * 3) if channels == 3 else b""
        body += struct.pack(order + "I", after + len(extra) if frame + 1 < frames else 0) + extra
        made += body
    return made


def pillow(values, kind, mode=None):
    buffer = io.BytesIO()
    made = Image.fromarray(values)
    (made.convert(mode) if mode else made).save(buffer, kind)
    return buffer.getvalue()


BITS = np.array([[0, 1, 1], [1, 0, 1]])[..., None]
COLOURS = bytes([1, 2, 3, 250, 251, 252])
GREY_ALPHA = WIDE[..., :2]

READ = {
    "PNG, grey of 1 bit": (png(BITS, 0, 1), (BITS * 255).astype(np.uint8)),
    "PNG, grey of 4 bits": (png(BITS * 15, 0, 4), (BITS * 255).astype(np.uint8)),
    "PNG, grey of 8 bits": (png(NARROW[..., :1], 0, 8), NARROW[..., :1]),
    "PNG, grey of 16 bits": (png(WIDE[..., :1], 0, 16), WIDE[..., :1]),
    "PNG, palette": (png(BITS, 3, 1, COLOURS), np.frombuffer(COLOURS, np.uint8).reshape(2, 3)[BITS[..., 0]]),
    "PNG, grey and alpha": (png(NARROW[..., :2], 4, 8), NARROW[..., [0, 0, 0, 1]]),
    "PNG, RGB": (png(NARROW[..., :3], 2, 8), NARROW[..., :3]),
    "PNG, RGBA": (png(NARROW, 6, 8), NARROW),
    "PNG, RGB of 48 bits": (png(WIDE[..., :3], 2, 16), WIDE[..., :3]),
    "PNG, RGBA of 64 bits": (png(WIDE, 6, 16), WIDE),
    "PNG, grey and alpha of 32 bits": (png(GREY_ALPHA, 4, 16), GREY_ALPHA[..., [0, 0, 0, 1]]),
    "TIFF, L": (tiff(NARROW[..., :1]), NARROW[..., :1]),
    "TIFF, 16 bits": (tiff(WIDE[..., :1]), WIDE[..., :1]),
    "TIFF, 16 bits, big endian": (tiff(WIDE[..., :1], ">"), WIDE[..., :1]),
    "TIFF, float": (tiff(FLOAT), FLOAT),
    "TIFF, float, big endian": (tiff(FLOAT, ">"), FLOAT),
    "TIFF, float, as LeRobot writes it": (pillow(FLOAT[..., 0], "TIFF"), FLOAT),
    "TIFF, 16 bits, as LeRobot writes it": (pillow(WIDE[..., 0], "TIFF"), WIDE[..., :1]),
    "TIFF, RGB": (tiff(NARROW[..., :3], photometric=2), NARROW[..., :3]),
}

REFUSED = {
    "TIFF, RGB of 48 bits": (tiff(WIDE[..., :3], photometric=2), "RGB;16"),
    "TIFF, float64": (tiff(FLOAT.astype(np.float64)), "TIFF"),
    "TIFF, float16": (tiff(FLOAT.astype(np.float16)), "TIFF"),
    "GIF": (pillow(NARROW[..., 0], "GIF"), "GIF"),
    "TIFF, int16": (tiff(WIDE[..., :1].view(np.int16)), "I;16S"),
    "TIFF, uint32": (tiff(WIDE[..., :1].astype(np.uint32)), "I;32"),
    "TIFF, int8": (tiff(NARROW[..., :1].view(np.int8)), "signed L"),
    "TIFF, white is 0": (tiff(NARROW[..., :1], photometric=0), "L;I"),
    "TIFF, two frames": (tiff(NARROW[..., :1], frames=2), "several frames"),
    "JPEG, CMYK": (pillow(NARROW[..., :3], "JPEG", "CMYK"), "CMYK"),
}


# -- where they lie -------------------------------------------------------------------------------


def in_folder(root, data, values):
    """A folder of another program, which says nothing of its pictures."""
    suffix = {b"\x89P": "png", b"II": "tiff", b"MM": "tiff"}.get(data[:2], "jpeg")
    (root / "x").mkdir(parents=True)
    np.savez(root / "ep_len.npz", np.array([2], np.int32))
    np.savez(root / "ep_offset.npz", np.array([0], np.int64))
    np.savez(root / "index.npz", np.arange(2))
    for step in range(2):
        (root / f"x/ep_0_step_{step}.{suffix}").write_bytes(data)
    return root


def in_lance(root, data, values):
    """A Lance dataset of another program."""
    lance = pytest.importorskip("lance", reason="pylance is not installed")
    import pyarrow as pa

    table = {"episode_idx": pa.array([0, 0], pa.int32()), "step_idx": pa.array([0, 1], pa.int32())}
    table |= {"x": pa.array([data, data], pa.binary()), "index": pa.array([0, 1])}
    lance.write_dataset(pa.table(table), root / "x.lance")
    return root / "x.lance"


def lerobot(root, feature, rows=None, film=None, length=2):
    """A LeRobot dataset of one episode, with one column of pictures, x."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow as pa
    import pyarrow.parquet as pq

    for folder in ("meta/episodes/chunk-000", "data/chunk-000", "videos/x/chunk-000"):
        (root / folder).mkdir(parents=True)
    place = "chunk-{chunk_index:03d}/file-{file_index:03d}"
    info = {
        "codebase_version": "v3.0",
        "fps": 10,
        "data_path": f"data/{place}.parquet",
        "video_path": f"videos/{{video_key}}/{place}.mp4",
        "features": {
            "x": {"names": ["height", "width", "channels"], **feature},
            "index": {"dtype": "int64", "shape": [1]},
        },
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    home = {"data/chunk_index": 0, "data/file_index": 0}
    if film is not None:
        (root / "videos/x/chunk-000/file-000.mp4").write_bytes(film)
        home |= {"videos/x/chunk_index": 0, "videos/x/file_index": 0, "videos/x/from_timestamp": 0.0}
    pq.write_table(
        pa.Table.from_pylist([{"episode_index": 0, "length": length, **home}]),
        root / "meta/episodes/chunk-000/file-000.parquet",
    )
    table = {"index": list(range(length)), "episode_index": [0] * length}
    if rows is not None:
        table["x"] = [{"bytes": data, "path": None} for data in rows]
    pq.write_table(pa.table(table), root / "data/chunk-000/file-000.parquet")
    return root


def in_lerobot(root, data, values):
    return lerobot(root, {"dtype": "image", "shape": list(values.shape)}, rows=[data, data])


WHERE = {"folder": in_folder, "lance": in_lance, "lerobot": in_lerobot}


def stored(path, **options):
    return load_dataset(path, output="numpy", layout="HWC", **options).load_episode(0)["x"]


def same(got, values):
    assert got.dtype == values.dtype
    assert got.shape == values.shape
    assert got.tobytes() == np.ascontiguousarray(values).tobytes()


@pytest.mark.parametrize("where", WHERE)
def test_each_kind_of_file_is_read_exactly(tmp_path, where):
    pytest.importorskip("av", reason="PyAV is not installed")
    for kind, (data, values) in READ.items():
        print(kind)
        path = WHERE[where](tmp_path / kind, data, values)
        same(stored(path), np.stack([values, values]))


@pytest.mark.parametrize("where", WHERE)
def test_what_would_be_changed_is_refused(tmp_path, where):
    for kind, (data, named) in REFUSED.items():
        print(kind)
        path = WHERE[where](tmp_path / kind, data, NARROW[..., :1])
        with pytest.raises(UnsupportedError, match=f"column 'x' is of pictures.*{named}.*keys_to_load="):
            load_dataset(path)
        rest = load_dataset(path, output="numpy", keys_to_load=["index"]).load_episode(0)
        assert rest["index"].tolist() == [0, 1]


def test_pictures_of_other_kinds_than_the_first_are_refused(tmp_path):
    """A column has one dtype: what does not fit is not made to fit, but grey may be three channels."""
    eight, sixteen = READ["PNG, RGB"][0], READ["PNG, RGB of 48 bits"][0]
    alpha, grey = READ["PNG, RGBA"][0], READ["PNG, grey of 8 bits"][0]
    for number, later in enumerate((sixteen, alpha)):
        path = in_folder(tmp_path / str(number), eight, None)
        (path / "x/ep_0_step_1.png").write_bytes(later)
        with pytest.raises(CorruptError, match=r"ep_0_step_1\.png: a picture of uint.*, expected uint8 \(6, 5, 3\)"):
            stored(path)
    path = in_folder(tmp_path / "grey", eight, None)
    (path / "x/ep_0_step_1.png").write_bytes(grey)
    same(stored(path), np.stack([NARROW[..., :3], NARROW[..., [0, 0, 0]]]))
    path = in_folder(tmp_path / "colour", grey, None)
    (path / "x/ep_0_step_1.png").write_bytes(eight)
    with pytest.raises(CorruptError, match=r"expected uint8 \(6, 5, 1\)"):
        stored(path)


def test_pictures_of_others_are_appended_to_exactly_or_not_at_all(tmp_path):
    pytest.importorskip("av", reason="PyAV is not installed")
    more = {"index": np.arange(1)}
    for where in ("folder", "lance"):
        for kind in ("PNG, grey of 16 bits", "PNG, RGBA", "PNG, RGB of 48 bits"):
            data, values = READ[kind]
            path = WHERE[where](tmp_path / f"{where}, {kind}", data, values)
            with get_format(where).open_writer(path) as writer:
                if "48" in kind:
                    with pytest.raises(InputError, match=r"uint16 \(6, 5, 3\) can't be written as png"):
                        writer.write_episode({"x": values[None], **more})
                else:
                    writer.write_episode({"x": values[None], **more})
            dataset = load_dataset(path, output="numpy", layout="HWC")
            assert dataset.lengths.tolist() == ([2] if "48" in kind else [2, 1])
            same(dataset.load_episode(-1)["x"][0], values)
    path = in_videos(tmp_path / "film", film("rgba64le", FILMS["rgba64le"]), FRAMES)
    with get_format("video").open_writer(path) as writer, pytest.raises(InputError, match="as lossless video"):
        writer.write_episode({"x": FRAMES})


def test_damage_is_no_picture(tmp_path):
    """A picture that is cut, and one whose tiles would take more memory than any picture."""
    pytest.importorskip("av", reason="PyAV is not installed")
    damaged = {kind: READ[kind][0] for kind in ("PNG, RGB of 48 bits", "PNG, grey of 16 bits", "TIFF, float")}
    damaged = {kind: data[: len(data) // 2] for kind, data in damaged.items()}
    damaged["tiles"] = tiff(NARROW[..., :1], more=[(322, 4, 60_000), (323, 4, 60_000)])
    for kind, data in damaged.items():
        print(kind)
        with pytest.raises(CorruptError):
            stored(in_folder(tmp_path / kind, data, None))


def test_rlds_reads_what_the_file_holds():
    for kind in ("PNG, RGB of 48 bits", "PNG, RGBA", "PNG, grey of 16 bits"):
        data, values = READ[kind]
        leaf = Leaf("x", "picture", values.shape, values.dtype)
        same(decode(leaf, [data, data], 2, "here"), np.stack([values, values]))


def test_control_pillow_narrows(tmp_path, monkeypatch):
    """If 16-bit colours went to Pillow, they would come as 8 bits, and the table would tell."""
    monkeypatch.setattr(images, "_wide", lambda image, file, found, where: np.asarray(image))
    data, values = READ["PNG, RGB of 48 bits"]
    with pytest.raises(AssertionError):
        same(stored(in_folder(tmp_path, data, values)), np.stack([values, values]))


# -- video ----------------------------------------------------------------------------------------

FRAMES = rng.integers(0, 1 << 16, (11, 18, 20, 4), np.uint16)
"""More than go from one keyframe to the next."""


def film(pixels, values, codec="ffv1", options=None, frames=None):
    """Return an mp4 file of values as they are, or of frames of that size."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    file = io.BytesIO()
    container = av.open(file, "w", format="mp4")
    try:
        stream = container.add_stream(codec, rate=10, options=options or {})
    except ValueError:
        pytest.skip("FFmpeg puts no FFV1 into mp4 before version 7")
    stream.height, stream.width, stream.pix_fmt = *values.shape[1:3], pixels
    for number, rows in enumerate(values):
        squeezed = np.ascontiguousarray(rows[..., 0] if rows.shape[-1] == 1 else rows)
        frame = av.VideoFrame.from_ndarray(squeezed, pixels) if frames is None else frames[number]
        frame.pts = number
        container.mux(stream.encode(frame))
    container.mux(stream.encode())
    container.close()
    return file.getvalue()


FILMS = {
    "gray": (FRAMES[..., :1] >> 8).astype(np.uint8),
    "rgba": (FRAMES >> 8).astype(np.uint8),
    "gray16le": FRAMES[..., :1],
    "gray12le": FRAMES[..., :1] >> 4,
    "rgb48le": FRAMES[..., :3],
    "gbrp10le": FRAMES[..., :3] >> 6,
    "rgba64le": FRAMES,
}


def in_videos(root, data, values):
    (root / "x").mkdir(parents=True)
    np.savez(root / "ep_len.npz", np.array([len(values)], np.int32))
    np.savez(root / "ep_offset.npz", np.array([0], np.int64))
    (root / "x/ep_0.mp4").write_bytes(data)
    return root


def in_robot_videos(root, data, values):
    return lerobot(root, {"dtype": "video", "shape": list(values.shape[1:])}, film=data, length=len(values))


@pytest.mark.parametrize("where", [in_videos, in_robot_videos])
def test_each_kind_of_video_is_read_exactly(tmp_path, where):
    for pixels, values in FILMS.items():
        print(pixels)
        made = {"rgba": "bgra"}.get(pixels, pixels)
        frames = values[..., [2, 1, 0, 3]] if made == "bgra" else values
        path = where(tmp_path / pixels, film(made, frames), values)
        same(stored(path), values)
        dataset = load_dataset(path, output="numpy", layout="HWC")
        same(np.stack([dataset[i]["x"][0] for i in (9, 3)]), values[[9, 3]])


def test_yuv_of_more_than_8_bits_comes_as_16_bits_of_rgb(tmp_path):
    """All is converted: nothing of ten bits is lost on the way, white is white."""
    av = pytest.importorskip("av")
    white = np.full((2, 18, 20, 3), 65535, np.uint16)
    white[:, 9:] = 0
    frames = []
    for rows in white:  # by hand: FFmpeg's own conversion to this format is not the same each time
        frame = av.VideoFrame(20, 18, "yuv444p10le")
        for plane, values in zip(frame.planes, (np.where(rows[..., 0] > 0, 940, 64), 512, 512), strict=True):
            samples = np.zeros((18, plane.line_size // 2), "<u2")
            samples[:, :20] = values
            plane.update(samples)
        frames.append(frame)
    got = stored(in_videos(tmp_path, film("yuv444p10le", white, frames=frames), white))
    assert got.dtype == np.uint16
    assert np.abs(got.astype(int) - white).max() < 300
    for name in ("ya8", "pal8", "grayf32le", "gbrpf32le", "bayer_rggb8", "bayer_rggb16le"):
        with pytest.raises(UnsupportedError, match=name):
            videos._picture(av.VideoFormat(name), 18, 20, "here")


def test_video_of_another_kind_than_the_first_is_refused(tmp_path):
    path = in_videos(tmp_path, film("gray16le", FILMS["gray16le"]), FILMS["gray16le"])
    dataset = load_dataset(path, output="numpy")
    (path / "x/ep_0.mp4").write_bytes(film("gray", FILMS["gray"]))
    with pytest.raises(CorruptError, match="frames of uint8"):
        videos.Decoder(str(path / "x/ep_0.mp4")).read([0], np.empty((1, 18, 20, 1), np.uint16))
    with pytest.raises(CorruptError, match="in colours"):
        data = film("rgb48le", FILMS["rgb48le"])
        videos.Decoder("here", data).read([0], np.empty((1, 18, 20, 1), np.uint16))
    dataset.close()


# -- LeRobot's depth ------------------------------------------------------------------------------

CODES = rng.integers(0, 1 << 12, (11, 18, 20, 1), np.uint16)
CODES[0, 0, :3, 0] = 0, 1, 4095
LOG = {"video.depth_min": 0.2, "video.depth_max": 6.0, "video.shift": 0.5, "video.use_log": True}


def millimetres(codes, least=0.01, most=10.0, shift=3.5, use_log=True):
    """The inverse of LeRobot's quantizer, in double precision."""
    part = codes / 4095
    if use_log:
        low, high = np.log(least + shift), np.log(most + shift)
        return 1000 * (np.exp(low + part * (high - low)) - shift)
    return 1000 * (least + part * (most - least))


@pytest.mark.parametrize(
    ("told", "parameters"),
    [
        ({"info": {"is_depth_map": True}}, {}),
        ({"video_info": {"video.is_depth_map": True}}, {}),
        ({"info": {"is_depth_map": True, **LOG}}, {"least": 0.2, "most": 6.0, "shift": 0.5}),
        (
            {"info": {"video.is_depth_map": True, **LOG, "video.use_log": False}},
            {"least": 0.2, "most": 6.0, "use_log": False},
        ),
    ],
)
@pytest.mark.parametrize("pixels", ["gray12le", "gray16le"])
def test_codes_of_depth_are_millimetres(tmp_path, told, parameters, pixels):
    data = film(pixels, CODES)
    path = lerobot(tmp_path, {"dtype": "video", "shape": [18, 20, 1], **told}, film=data, length=11)
    same(stored(path, depth="codes"), CODES)
    got = stored(path)
    if pixels == "gray16le" and not parameters:  # no codes: depth as a camera gives it
        same(got, CODES)
        return
    assert got.dtype == np.uint16
    assert np.abs(got - millimetres(CODES, **parameters)).max() < 0.51  # rounded, in single precision


def test_depth_that_is_no_code(tmp_path):
    """Pictures of depth are depth; a code beyond twelve bits, an option that is none, and parameters without sense are
    refused."""
    depth = {"shape": [18, 20, 1], "info": {"is_depth_map": True, **LOG}}
    raw = {"dtype": "image", **depth, "shape": [6, 5, 1]}
    data, values = READ["TIFF, float, as LeRobot writes it"]
    same(stored(lerobot(tmp_path / "raw", raw, rows=[data] * 2)), np.stack([values, values]))
    wide = lerobot(tmp_path / "wide", {"dtype": "video", **depth}, film=film("gray16le", CODES + 9), length=11)
    with pytest.raises(CorruptError, match=r"code of depth of 4104.*depth=\"codes\""):
        stored(wide)
    same(stored(wide, depth="codes"), CODES + 9)
    with pytest.raises(InputError, match="depth must be one of"):
        load_dataset(wide, depth="metres")
    depth["info"] |= {"video.shift": -3}
    wrong = lerobot(tmp_path / "wrong", {"dtype": "video", **depth}, film=film("gray12le", CODES), length=11)
    with pytest.raises(CorruptError, match=r"expected 0 < depth_min \+ shift"):
        load_dataset(wrong)


# -- written --------------------------------------------------------------------------------------


def test_16_bits_are_written_as_pictures_where_the_codec_holds_them(tmp_path):
    """PNG holds grey of 16 bits, and a lossless video colours too; in all else, and in lossy codecs, such a column is
    numbers. All is exact."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    grey, wide = WIDE[None, ..., :1].repeat(3, 0), FRAMES[..., :3]
    made = {
        "png": ("folder", {"image_format": "png"}, {"grey": "png", "rgba": "png"}),
        "jpeg": ("folder", {}, {}),
        "film": ("video", {"lossless": True}, {"grey": "mp4", "wide": "mp4"}),
        "lossy": ("video", {}, {}),
    }
    for name, (kind, options, pictures) in made.items():
        path = tmp_path / name
        rows = {"grey": grey, "wide": wide[:3], "rgba": NARROW[None].repeat(3, 0)}
        with get_format(kind).open_writer(path, **options) as writer:
            writer.write_episode(rows)
            logged = load_dataset(path, output="numpy").load_episode(0)  # from the log
        with get_format(kind).open_writer(path) as writer:  # an option does not change what is there
            writer.write_episode(rows)
        how = {name: how for name, _, how, *_ in json.loads((path / "ep_len.json").read_text())["columns"]}
        assert how == {**dict.fromkeys(rows, "npz"), **pictures}
        for got in (logged, *map(load_dataset(path, output="numpy").load_episode, (0, 1))):
            assert got.channels_first == set(rows)
            for column, values in rows.items():
                same(got[column], np.moveaxis(values, -1, 1))
    same(np.asarray(Image.open(tmp_path / "png/grey/ep_1_step_2.png")).astype(np.uint16), WIDE[..., 0])
    with av.open(tmp_path / "film/grey/ep_1.mp4") as container:  # a frame is a PNG for any program
        packet = next(packet for packet in container.demux(video=0) if packet.size)
        opened = np.asarray(Image.open(io.BytesIO(bytes(packet)))).astype(np.uint16)
        same(opened[:6, :5], WIDE[..., 0])


def test_only_pictures_are_turned(tmp_path):
    """uint8 and uint16 of 1, 3 or 4 channels; floats, int16, and other numbers of channels stay."""
    rows = {
        f"{kind}-{n}": np.zeros((2, 5, 6, n), kind)
        for kind in ("uint8", "uint16", "int16", "float32")
        for n in range(1, 6)
    }
    with get_format("hdf5").open_writer(tmp_path / "x.h5") as writer:
        writer.write_episode(rows)
    episode = load_dataset(tmp_path / "x.h5", output="numpy").load_episode(0)
    turned = {name for name, values in episode.items() if tuple(values.shape) != rows[name].shape}
    assert turned == {f"{kind}-{n}" for kind in ("uint8", "uint16") for n in (1, 3, 4)} == set(episode.channels_first)
