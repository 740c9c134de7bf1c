"""Models to publish."""

import torch


def net(width=64):
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 8))


def filled(value, width=8):
    """Return a net all of whose numbers are `value`."""
    model = net(width)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def values(model):
    """Return the distinct numbers of a model."""
    return {number for tensor in model.state_dict().values() for number in tensor.unique().tolist()}


class Tied(torch.nn.Module):
    """Of several dtypes, with a tied layer, a buffer that is a view, and an empty one."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.brief = torch.nn.Parameter(torch.rand(2, 3).to(torch.bfloat16))
        whole = torch.arange(12.0).reshape(3, 4)
        self.register_buffer("whole", whole)
        self.register_buffer("turned", whole.T)
        self.register_buffer("part", whole[1:])
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", torch.empty(0, 2))
