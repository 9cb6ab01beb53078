"""Prepared data: what task.prepare_data returns, made once for a key, saved, and verified.

1. run_data.read_data    is asked: the data of a config, the task with it, and its views
2. prepared_key.key_of   names them, by fields, files and code
3. prepared.build        makes them under a lock, in a folder that is renamed when it is whole
4. preview               shows a row and a batch of them, for --check
"""
