"""The devices of a worker that is a mesh: how long they are waited for, and with which of them it goes on."""
