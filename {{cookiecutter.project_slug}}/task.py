{{cookiecutter.__task | task_source}}
