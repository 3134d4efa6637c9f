"""Carrying weights from the learner to the engines: what is sent, how it is cut, what carries it."""
