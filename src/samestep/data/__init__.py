"""Rows of data from files, the Hub and bundled datasets. A row passes these modules, in this order:

    sources   the fields of a task that say where its rows come from
    inputs    the rows of each source: a dataset of the Hub, or the files that `files` lists
    readers   rows as they stand in the files, each with its place; the first chooses the format,
              which says what is stored of each
    rows      load_rows: what is stored, in Arrow files, held out or not
    images    one image: opened safely, upright, on white, cut to a square
    labels    classes and numbers, of tasks that have them
    views     rows of a step as numpy arrays, when the model trains

What is stored of a row, and its tokens, say the modules of samestep.text and samestep.images.
`prepared.prepared` saves what a task makes of the rows, and `step.samples` makes batches of views.
demo_data has the bundled datasets; plain is the door of a task.py of one's own.
"""
