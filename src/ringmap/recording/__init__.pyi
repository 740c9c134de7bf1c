from ringmap.recording.wrapper import ReplayBufferCollectionWrapper

__all__ = ["ReplayBufferCollectionWrapper"]
