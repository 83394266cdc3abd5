"""The model of engines that wait for each other's blocks: does every wait end?"""
