"""What lerobot uses of torchvision, which has no build for this torch: pictures as tensors, films by PyAV, a
ResNet-18."""

import importlib.machinery
import sys
import types
from collections import OrderedDict
from functools import partial

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


class FrozenBatchNorm2d(torch.nn.Module):
    """A scale and a shift of each channel, which do not learn."""

    def __init__(self, channels):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x):
        scale = self.weight / (self.running_var + 1e-5).sqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class Block(torch.nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before, after, stride, norm):
        super().__init__()
        conv = partial(torch.nn.Conv2d, bias=False)
        self.body = torch.nn.Sequential(
            conv(before, after, 3, stride, 1), norm(after), torch.nn.ReLU(), conv(after, after, 3, 1, 1), norm(after)
        )
        alike = stride == 1 and before == after
        self.shortcut = (
            torch.nn.Identity() if alike else torch.nn.Sequential(conv(before, after, 1, stride), norm(after))
        )

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(replace_stride_with_dilation=None, weights=None, norm_layer=torch.nn.BatchNorm2d):
    """ResNet-18 without weights (He et al. 2015)."""
    assert weights is None and not any(replace_stride_with_dilation or ())
    stem = [torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm_layer(64), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)]
    parts = {"stem": torch.nn.Sequential(*stem)}
    before = 64
    for number, channels in enumerate((64, 128, 256, 512), 1):
        first = Block(before, channels, 1 if number == 1 else 2, norm_layer)
        parts[f"layer{number}"] = torch.nn.Sequential(first, Block(channels, channels, 1, norm_layer))
        before = channels
    made = torch.nn.Sequential(OrderedDict(parts))
    made.fc = torch.nn.Linear(512, 1000)
    return made


class IntermediateLayerGetter(torch.nn.Module):
    """The output of one layer, by a name."""

    def __init__(self, model, return_layers):
        super().__init__()
        ((last, self.name),) = return_layers.items()
        names = [name for name, _ in model.named_children()]
        self.body = torch.nn.Sequential(*list(model.children())[: names.index(last) + 1])

    def forward(self, x):
        return {self.name: self.body(x)}


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
    made = {
        n: types.ModuleType(n)
        for n in (
            "torchvision",
            "torchvision.io",
            "torchvision.models",
            "torchvision.models._utils",
            "torchvision.ops",
            "torchvision.ops.misc",
            "torchvision.transforms",
            "torchvision.transforms.functional",
            "torchvision.transforms.v2",
            "torchvision.transforms.v2.functional",
        )
    }
    for name, module in made.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    top = made["torchvision"]
    top.__version__, top.set_video_backend = "0", lambda backend: None
    top.io, top.transforms = made["torchvision.io"], made["torchvision.transforms"]
    top.io.VideoReader, top.transforms.ToTensor = VideoReader, ToTensor
    top.transforms.functional = made["torchvision.transforms.functional"]
    top.transforms.v2 = made["torchvision.transforms.v2"]
    top.transforms.v2.Transform = torch.nn.Module
    top.transforms.v2.functional = made["torchvision.transforms.v2.functional"]
    top.models, top.models.resnet18 = made["torchvision.models"], resnet18
    made["torchvision.models._utils"].IntermediateLayerGetter = IntermediateLayerGetter
    made["torchvision.ops.misc"].FrozenBatchNorm2d = FrozenBatchNorm2d
    sys.modules.update(made)
    return tuple(made)
