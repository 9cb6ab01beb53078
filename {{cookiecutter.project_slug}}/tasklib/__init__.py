"""The modules that a task.py may use. None of them imports training/.

    sources, tables, hub    rows: which ones, and how they are read from files or the Hub
    cache, files, child     prepared data on disk; calls in a child process
    fields, messages        types of the fields of TaskConfig; text on one line
    pretrained              models of transformers to start from

The others belong to a kind of task. A new project holds those that task.py and the programs beside
it import, directly or through others; delete any that they no longer import.
"""
