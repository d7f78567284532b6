"""The parameters of `llama_values` as a module of PyTorch, for the writers."""

import torch
from torch import nn

from tests.universal.formats import llama_values


class Part(nn.Module):
    """Parameters and parts, with an arbitrary function that uses them all."""

    def forward(self):
        parameters = [each.float().mean() for each in self.parameters(recurse=False)]
        return sum([*parameters, *(child() for child in self.children())])


class Llama(nn.Module):
    """The model; its function is arbitrary: values are replaced."""

    def __init__(self):
        super().__init__()
        for name, shape in llama_values.PYTORCH.items():
            *parts, leaf = name.split(".")
            part = self
            for key in parts:
                if not hasattr(part, key):
                    part.add_module(key, Part())
                part = getattr(part, key)
            part.register_parameter(leaf, nn.Parameter(torch.ones(shape)))

    def forward(self, tokens):
        return (self.model() + tokens.float().mean()).square()
