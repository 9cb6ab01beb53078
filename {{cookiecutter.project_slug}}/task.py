{{cookiecutter.task | task_source}}
