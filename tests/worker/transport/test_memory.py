import platform

from worker.transport.memory import keep_message_buffers


def test_message_buffers_are_kept_where_the_c_library_can() -> None:
    assert keep_message_buffers() is (platform.libc_ver()[0] == "glibc")
