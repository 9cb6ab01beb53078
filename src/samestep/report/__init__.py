"""What is told of a run.

    tracking.Log         a line goes to metrics.jsonl, the tracker and the screen
    speed.SpeedMeter     its throughput, and where the time goes; speed.Profiler: traces of steps
    curves.draw          curves.png of one run, or of several
    model_card           the README of an exported model

`training.log.RunLog` says when there is a line, and means of which steps it has.
"""
