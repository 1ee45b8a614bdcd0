"""The CUDA driver library through ctypes: virtual memory, which torch does not expose.

Nothing here needs a GPU to be imported: `Driver.load` returns None where there is no driver.

Source of names, structures and constants: CUDA Driver API, "Virtual Memory Management" (cuda.h, stable since CUDA 10.2).
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from functools import cache
from typing import Any

_LIBRARIES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")

_ALLOCATION_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory of the device that stays there
_LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_ACCESS_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_GRANULARITY_MINIMUM = 0
_ATTRIBUTE_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4))


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_handle", c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class DriverError(Exception):
    """The driver refused; `code` is its CUresult."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} failed: {name} ({code})")
        self.code = code


class Driver:
    """The calls that are used, on the current context of the calling thread. Each raises DriverError when the driver refuses."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, types in {
            "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong),
            "cuMemAddressFree": (c_uint64, c_size_t),
            "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_AllocationProp), c_ulonglong),
            "cuMemRelease": (c_uint64,),
            "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_ulonglong),
            "cuMemUnmap": (c_uint64, c_size_t),
            "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_AccessDesc), c_size_t),
            "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_AllocationProp), c_int),
            "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
            "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
            "cuGetErrorName": (c_int, POINTER(c_char_p)),
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int

    @staticmethod
    @cache
    def load() -> Driver | None:
        """The driver of this machine, or None where there is none or an old one."""
        for name in _LIBRARIES:
            try:
                return Driver(ctypes.CDLL(name))
            except (OSError, AttributeError):
                continue
        return None

    def supports_virtual_memory(self, device: int) -> bool:
        """Whether ranges can be reserved and filled piece by piece on a device."""
        value = c_int(0)
        try:
            self._call("cuDeviceGetAttribute", byref(value), _ATTRIBUTE_VIRTUAL_MEMORY, device)
        except DriverError:
            return False
        return value.value == 1

    def granularity(self, device: int) -> int:
        """Bytes of which physical memory is a multiple."""
        size, prop = c_size_t(0), _prop(device)
        self._call("cuMemGetAllocationGranularity", byref(size), byref(prop), _GRANULARITY_MINIMUM)
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """A range of addresses without memory behind it."""
        address = c_uint64(0)
        self._call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def unreserve(self, address: int, num_bytes: int) -> None:
        """Give a range back; nothing may be mapped in it."""
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int, device: int) -> int:
        """Physical memory of a device; its handle."""
        handle, prop = c_uint64(0), _prop(device)
        self._call("cuMemCreate", byref(handle), num_bytes, byref(prop), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Give physical memory back, once it is mapped nowhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Put physical memory behind addresses."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take it away; whole mappings that follow each other, one or several."""
        self._call("cuMemUnmap", address, num_bytes)

    def allow(self, address: int, num_bytes: int, device: int) -> None:
        """Let a device read and write what is mapped there."""
        access = _AccessDesc(_Location(_LOCATION_DEVICE, device), _ACCESS_READ_WRITE)
        self._call("cuMemSetAccess", address, num_bytes, byref(access), 1)

    def device_address(self, host_address: int) -> int:
        """Where the device sees page-locked memory; the same address if the driver cannot tell."""
        address = c_uint64(0)
        try:
            self._call("cuMemHostGetDevicePointer_v2", byref(address), host_address, 0)
        except DriverError:
            return host_address
        return address.value

    def _call(self, function: str, *args: Any) -> None:
        code = int(getattr(self._library, function)(*args))
        if code:
            name = c_char_p()
            self._library.cuGetErrorName(code, byref(name))
            raise DriverError(function, code, (name.value or b"unknown error").decode("ascii", "replace"))


def _prop(device: int) -> _AllocationProp:
    prop = _AllocationProp()  # all zero
    prop.type = _ALLOCATION_PINNED
    prop.location = _Location(_LOCATION_DEVICE, device)
    return prop
