"""The small convolutional network: three tasks of the bundled images, with ten labels each."""

TASKS = ("mini_mnist", "mini_fashion_mnist", "mini_notmnist")
