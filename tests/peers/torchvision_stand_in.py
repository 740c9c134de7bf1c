"""What lerobot uses of torchvision, which has no build for this torch: pictures as tensors, films by PyAV."""

import importlib.machinery
import sys
import types

import av
import numpy as np
import torch


class ToTensor:
    def __call__(self, picture):
        pixels = np.asarray(picture)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


class VideoReader:
    def __init__(self, path, stream):
        self.container = av.open(path)

    def seek(self, time_s, keyframes_only=False):
        self.container.seek(int(time_s * 1e6))

    def __iter__(self):
        for frame in self.container.decode(video=0):
            yield {"pts": frame.time, "data": torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)}


def install():
    """Stand in, if the real one does not import; return the names of the modules, which other libraries must not
    find."""
    import datasets  # noqa: F401  looks whether torchvision is there

    try:
        import torchvision  # noqa: F401
    except Exception:
        pass
    else:
        return ()
    names = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
    made = {n: types.ModuleType(n) for n in ("torchvision", *(f"torchvision.{name}" for name in names))}
    for name, module in made.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        above, _, own = name.rpartition(".")
        if above:
            setattr(made[above], own, module)
    top = made["torchvision"]
    top.__version__, top.set_video_backend = "0", lambda backend: None
    top.io.VideoReader, top.transforms.ToTensor = VideoReader, ToTensor
    top.transforms.v2.Transform = torch.nn.Module
    sys.modules.update(made)
    return tuple(made)
