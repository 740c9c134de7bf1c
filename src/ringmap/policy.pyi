from ringmap.world.policies import (
    BasePolicy,
    ExpertPolicy,
    FeedForwardPolicy,
    FunctionPolicy,
    RandomPolicy,
)

__all__ = ["BasePolicy", "ExpertPolicy", "FeedForwardPolicy", "FunctionPolicy", "RandomPolicy"]
