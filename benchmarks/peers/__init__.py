"""Other libraries: one adapter each, all with the protocol of `base.Peer`: make, add, sample, close."""
