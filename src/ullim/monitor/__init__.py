"""What a run leaves behind and shows while it goes on: its directory, metrics, samples, timings and live view.

Dashboard and report read only what this room writes. Reading a run needs neither torch nor Ray; only `summary`,
which takes its definitions from `objective`, imports torch.
"""
