//! Memory of one process in another: by CUDA IPC, by descriptors, by the fabric, in one allocation or in several side by side.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{DeviceBuffer, DeviceMapping, DeviceRegion, Gpu, Handle, SharedExtent};
use pdkv_device::{recv_fds, send_fds};

use crate::common::{Other, noise, parent, tell, word};
use crate::standin::{ALONE, MADE, alive, counts, kernel_copy, segments, since, whole};

type Change = fn(&mut Vec<SharedExtent>);

const GRANULE: u64 = 2 << 20;
const FD: i32 = 1;
const FABRIC: i32 = 8;

/// Gives a region away as the engine does: numbers and names in a message, descriptors beside it.
fn give(socket: &mut UnixStream, len: u64, extents: &[SharedExtent]) {
    tell(socket, len);
    tell(socket, extents.len() as u64);
    for extent in extents {
        for number in [extent.region_offset, extent.len, extent.offset, extent.allocation_len] {
            tell(socket, number);
        }
        let (kind, name) = match &extent.handle {
            Handle::Ipc(name) => (0, *name),
            Handle::Fabric(name) => (1, *name),
            Handle::Fd(_) => (2, [0; 64]),
        };
        tell(socket, kind);
        for part in name.chunks(8) {
            tell(socket, u64::from_le_bytes(part.try_into().unwrap()));
        }
        if let Handle::Fd(fd) = &extent.handle {
            send_fds(socket.as_fd(), &[fd.as_fd()], &[1], &AtomicBool::new(false)).unwrap();
        }
    }
}

fn take(socket: &mut UnixStream) -> (u64, Vec<SharedExtent>) {
    let (len, count) = (word(socket), word(socket));
    let extents = (0..count)
        .map(|_| {
            let [region_offset, len, offset, allocation_len, kind] = [(); 5].map(|()| word(socket));
            let mut name = [0; 64];
            for part in name.chunks_mut(8) {
                part.copy_from_slice(&word(socket).to_le_bytes());
            }
            SharedExtent {
                region_offset,
                len,
                offset,
                allocation_len,
                handle: match kind {
                    0 => Handle::Ipc(name),
                    1 => Handle::Fabric(name),
                    _ => Handle::Fd(recv_fds(socket.as_fd(), &mut [0], 1).unwrap().unwrap().1.remove(0)),
                },
            }
        })
        .collect();
    (len, extents)
}

fn read(region: &DeviceRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// In the other process: maps what it is given on the GPU it is told, answers with what it found, and leaves a mark.
#[test]
fn neighbour() {
    let Some(mut socket) = parent() else {
        return;
    };
    let (driver, path) = whole().unwrap();
    let gpu = Gpu::open_on(&driver, word(&mut socket) as u32).unwrap();
    loop {
        let (len, extents) = take(&mut socket);
        if len == 0 {
            return;
        }
        let before = alive(path);
        let opened = || counts(path).get("calls cuIpcOpenMemHandle_v2").copied().unwrap_or(0);
        let opened_before = opened();
        let mapping = DeviceMapping::open(&gpu, len, &extents);
        let again = DeviceMapping::open(&gpu, len, &extents);
        let ipc = matches!(extents[0].handle, Handle::Ipc(_));
        assert!(
            mapping.is_err() || opened() - opened_before == i64::from(ipc),
            "a handle is opened once"
        );
        drop(extents);
        let Ok(mapping) = mapping else {
            assert_eq!(alive(path), before, "a refusal leaves nothing");
            tell(&mut socket, 0);
            continue;
        };
        let shared = again.unwrap().address() == mapping.address();
        tell(&mut socket, 1 + u64::from(shared));
        let region = mapping.region();
        drop(mapping);
        assert!(region.of_another_process());
        assert!(region.share().unwrap_err().message().contains("another process's"));
        let here = DeviceRegion::allocate(&gpu, len).unwrap();
        kernel_copy(&gpu, region.address(), here.address(), len);
        let bytes = read(&here);
        assert!(bytes == read(&region), "a kernel and the driver see the same");
        drop(here);
        let sum = bytes
            .iter()
            .fold(7, |sum: u64, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        tell(&mut socket, sum);
        region.part(len - 1, 1).unwrap().write_at(0, &[0xEE]).unwrap();
        drop(region);
        assert_eq!(alive(path), before, "the mapping goes with its last holder");
        tell(&mut socket, 3);
    }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(7, |sum, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)))
}

fn start(path: &Path, ordinal: u64, more: &[(&str, &str)]) -> Other {
    let environment = [&[(MADE, path.to_str().unwrap())], more].concat();
    let mut other = Other::start_with("sharing::neighbour", &environment);
    other.tell(ordinal);
    other
}

/// What the other process says of a region: whether it is mapped, and whether a second mapping is the same.
fn offer(other: &mut Other, region: &DeviceRegion) -> u64 {
    give(&mut other.socket, region.len(), &region.share().unwrap());
    other.word()
}

/// Fills a region, has it mapped and read and marked, and looks at the mark.
fn passes(other: &mut Other, region: &Arc<DeviceRegion>, one_mapping: bool) {
    let bytes = noise(region.address(), region.len());
    region.write_at(0, &bytes).unwrap();
    assert_eq!(offer(other, region), 1 + u64::from(one_mapping));
    assert_eq!(other.word(), sum(&bytes), "the bytes are the owner's");
    assert_eq!(other.word(), 3);
    let mut last = [0];
    region.read_at(region.len() - 1, &mut last).unwrap();
    assert_eq!(last, [0xEE], "what a peer writes is there");
}

fn of_segments(gpu: &Gpu, path: &Path, count: i32, offset: u64, len: u64, types: i32) -> Arc<DeviceRegion> {
    let address = segments(path, gpu.ordinal().cast_signed(), count, 2, types) + offset;
    // SAFETY: the segments are never freed.
    unsafe { DeviceRegion::from_raw(gpu, address, len, Box::new(())) }.unwrap()
}

#[test]
fn regions_are_mapped_by_another_process() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let mut other = start(path, 0, &[]);

    let pool = DeviceRegion::allocate(&gpu, 300_000).unwrap();
    assert!(matches!(pool.share().unwrap()[0].handle, Handle::Fd(_)));
    passes(&mut other, &pool, false);
    passes(&mut other, &pool.part(70_001, 9_999).unwrap(), false);

    let buffer = DeviceBuffer::new(gpu.context(), 100_000).unwrap();
    // SAFETY: the buffer lives as long as the region.
    let region = unsafe { DeviceRegion::from_raw(&gpu, buffer.address() + 1000, 5000, Box::new(buffer)) }.unwrap();
    let extents = region.share().unwrap();
    assert_eq!(
        (extents[0].offset, extents[0].allocation_len),
        (1000, 100_000),
        "a handle names the whole allocation"
    );
    assert!(matches!(extents[0].handle, Handle::Ipc(_)));
    passes(&mut other, &region, true);

    // From inside the first of four to inside the third.
    let region = of_segments(&gpu, path, 4, GRANULE + 17, 3 * 2 * GRANULE - GRANULE - 40_000, FD);
    let extents = region.share().unwrap();
    assert_eq!(extents.len(), 3);
    assert_eq!(
        (extents[1].region_offset, extents[1].offset, extents[1].len),
        (GRANULE - 17, 0, 2 * GRANULE)
    );
    let later = region.share_from(extents[1].region_offset, 1).unwrap();
    assert_eq!(
        (later.len(), later[0].len),
        (1, 2 * GRANULE),
        "extents can be had a few at a time"
    );
    assert!(region.share_from(region.len(), 1).is_err());
    passes(&mut other, &region, false);
    passes(&mut other, &of_segments(&gpu, path, 2, 0, 3 * GRANULE, FABRIC), false);
    other.tell(0);
    other.tell(0);
    assert!(other.child.wait().unwrap().success());
}

#[test]
fn what_a_driver_does_not_say_of_mapped_memory_is_found_otherwise() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let mut other = start(path, 0, &[("PDKV_STANDIN_FAIL", "cuMemGetAddressRange_v2:0:500")]);
    let buffer = DeviceBuffer::new(gpu.context(), 100_000).unwrap();
    // SAFETY: the buffer lives as long as the region.
    let region = unsafe { DeviceRegion::from_raw(&gpu, buffer.address() + 1000, 5000, Box::new(buffer)) }.unwrap();
    passes(&mut other, &region, true);
    // The allocation still has an end.
    let mut extents = region.share().unwrap();
    (extents[0].offset, extents[0].allocation_len) = (99_000, 1 << 20);
    give(&mut other.socket, 5000, &extents);
    assert_eq!(other.word(), 0);
    other.tell(0);
    other.tell(0);
    assert!(other.child.wait().unwrap().success());
}

#[test]
fn what_has_gone_is_not_mapped() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let mut other = start(path, 0, &[]);
    let buffer = DeviceBuffer::new(gpu.context(), 4096).unwrap();
    // SAFETY: the buffer lives as long as the region.
    let region = unsafe { DeviceRegion::from_raw(&gpu, buffer.address(), 4096, Box::new(buffer)) }.unwrap();
    let extents = region.share().unwrap();
    drop(region);
    give(&mut other.socket, 4096, &extents);
    assert_eq!(other.word(), 0);

    // A pool that a peer has mapped lives on: it keeps the memory, not the owner.
    let pool = DeviceRegion::allocate(&gpu, 4096).unwrap();
    pool.write_at(0, &[9; 4096]).unwrap();
    let extents = pool.share().unwrap();
    drop(pool);
    give(&mut other.socket, 4096, &extents);
    assert_eq!((other.word(), other.word(), other.word()), (1, sum(&[9; 4096]), 3));
}

#[test]
fn extents_that_cannot_be_are_refused() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let before = alive(path);
    let region = of_segments(&gpu, path, 2, 0, 4 * GRANULE, FD);
    let whole = 2 * GRANULE;
    // Each change of the two extents, and the part of the message that says what is wrong.
    let cases: [(Change, ErrorKind, &str); 9] = [
        (|extents| extents.truncate(1), ErrorKind::Region, "extents for"),
        (
            |extents| extents[1].region_offset += 1,
            ErrorKind::Region,
            "does not come next",
        ),
        (|extents| extents.swap(0, 1), ErrorKind::Region, "does not come next"),
        (|extents| extents[1].len += 1, ErrorKind::Region, "does not come next"),
        (|extents| extents[0].len = 0, ErrorKind::Region, "does not come next"),
        (
            |extents| extents[1].offset = u64::MAX,
            ErrorKind::Region,
            "does not come next",
        ),
        (
            |extents| {
                extents[0].len -= GRANULE;
                extents[1].region_offset -= GRANULE;
            },
            ErrorKind::Unsupported,
            "ends inside its allocation",
        ),
        (
            |extents| {
                extents[1].offset = 4096;
                extents[1].allocation_len += GRANULE;
            },
            ErrorKind::Unsupported,
            "begins inside its allocation",
        ),
        (
            |extents| extents[1].handle = Handle::Ipc([0; 64]),
            ErrorKind::Unsupported,
            "CUDA IPC puts",
        ),
    ];
    for (change, kind, part) in cases {
        let mut extents = region.share().unwrap();
        change(&mut extents);
        let error = DeviceMapping::open(&gpu, 2 * whole, &extents).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(part), "{part}: {error}");
    }
    // An allocation is as long as the driver says, not as its owner does.
    let mut extents = region.share().unwrap();
    extents[1].len += whole;
    extents[1].allocation_len += whole;
    let error = DeviceMapping::open(&gpu, 3 * whole, &extents).unwrap_err();
    assert!(error.message().contains("`cuMemMap` returned"), "{error}");
    let file = std::fs::File::open("/dev/null").unwrap();
    extents[0].handle = Handle::Fd(file.into());
    let error = DeviceMapping::open(&gpu, 3 * whole, &extents).unwrap_err();
    assert!(
        error.message().contains("`cuMemImportFromShareableHandle` returned"),
        "{error}"
    );
    drop(region);
    // The segments themselves are never freed.
    let made = [("laid".to_owned(), 2), ("reservations".to_owned(), 1)];
    assert_eq!(since(path, &before), made.into());
}
