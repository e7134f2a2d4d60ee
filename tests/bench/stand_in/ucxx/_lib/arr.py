class Array:
    def __init__(self, array):
        self.view = memoryview(array)
