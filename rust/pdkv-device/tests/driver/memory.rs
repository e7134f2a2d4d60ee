//! GPU memory as regions, host memory that a GPU reaches, which GPU holds an address, and processes that are forks.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::sync::{Arc, PoisonError};

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{DeviceBuffer, DeviceRegion, Gpu, Handle, HostAccess, PinnedBuffer, Witnesses};
use pdkv_device::{HostRegion, HugePages};

use crate::common::{Other, parent, tell};
use crate::standin::{ALONE, MADE, alive, calls, counts, fail, kernel_copy, other_memory, replace, segments, whole};

fn region(gpu: &Gpu, address: u64, len: u64) -> pdkv_core::Result<Arc<DeviceRegion>> {
    // SAFETY: what is made of it is dropped before the memory.
    unsafe { DeviceRegion::from_raw(gpu, address, len, Box::new(())) }
}

#[test]
fn a_region_is_of_one_gpu_from_end_to_end() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let (gpu, next) = (Gpu::open_on(&driver, 0).unwrap(), Gpu::open_on(&driver, 1).unwrap());
    let memory = DeviceBuffer::new(gpu.context(), 1 << 20).unwrap();
    let pinned = PinnedBuffer::new(gpu.context(), 64).unwrap();
    let plain = [0_u8; 64];
    let pool = other_memory(path, 0, 4096, 0);
    let managed = other_memory(path, 0, 4096, 1);
    let cases = [
        (&gpu, memory.address(), 0, ErrorKind::Region, "empty"),
        (&gpu, 0, 8, ErrorKind::Region, "null"),
        (&gpu, memory.address(), u64::MAX, ErrorKind::Region, "past the end"),
        (
            &gpu,
            memory.address(),
            1 << 40, // somebody's memory may begin where this ends
            ErrorKind::Region,
            "the memory at",
        ),
        (
            &next,
            memory.address(),
            8,
            ErrorKind::Region,
            "is of GPU `0`, GPU `1` was named",
        ),
        (&gpu, pinned.address(), 8, ErrorKind::Region, "is host memory"),
        (
            &gpu,
            plain.as_ptr().expose_provenance() as u64,
            8,
            ErrorKind::Region,
            "is not the driver's",
        ),
        (&gpu, managed, 8, ErrorKind::Unsupported, "is managed"),
    ];
    for (gpu, address, len, kind, part) in cases {
        let error = region(gpu, address, len).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(part), "{part}: {error}");
    }
    let whole = region(&gpu, memory.address(), 1 << 20).unwrap();
    let part = whole.part(100, 50).unwrap();
    drop(whole);
    part.write_at(40, b"0123456789").unwrap();
    let mut bytes = [0; 10];
    part.read_at(40, &mut bytes).unwrap();
    assert_eq!(
        (&bytes, part.len(), part.address()),
        (b"0123456789", 50, memory.address() + 100)
    );
    for error in [
        part.write_at(41, &bytes).unwrap_err(),
        part.read_at(u64::MAX, &mut bytes).unwrap_err(),
        part.part(50, 1).unwrap_err(),
        part.part(0, 0).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Region);
    }
    let pool = region(&gpu, pool, 4096).unwrap();
    let reason = pool.share().unwrap_err();
    assert!(reason.message().contains("cudaMallocAsync"), "{reason}");
    let fresh = DeviceRegion::allocate(&gpu, 100).unwrap();
    let mut bytes = [1; 100];
    fresh.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 100], "fresh memory shows nobody's bytes");
}

#[test]
fn memory_that_was_replaced_is_noticed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let start = segments(path, 0, 3, 1, 1);
    let cache = region(&gpu, start + 100, 5 << 20).unwrap();
    let part = cache.part(8, 8).unwrap();
    part.still_there().unwrap();
    DeviceRegion::allocate(&gpu, 8).unwrap().still_there().unwrap();
    replace(path, start + (2 << 20));
    let error = part.still_there().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Region);
    assert!(error.message().contains("other memory"), "{error}");
    region(&gpu, start + 100, 5 << 20).unwrap().still_there().unwrap();
    for bytes in [4096, 4 << 20] {
        let memory = DeviceBuffer::new(gpu.context(), bytes).unwrap();
        let cache = region(&gpu, memory.address(), 4096).unwrap();
        cache.still_there().unwrap();
        replace(path, memory.address());
        let error = cache.still_there().unwrap_err();
        assert!(error.message().contains("other memory"), "{bytes}: {error}");
    }
}

#[test]
fn a_glance_asks_for_few_allocations_and_in_time_for_all() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let buffers: Vec<_> = (0..40)
        .map(|_| DeviceBuffer::new(gpu.context(), 4096).unwrap())
        .collect();
    let regions: Vec<_> = buffers
        .iter()
        .map(|buffer| region(&gpu, buffer.address(), 4096).unwrap())
        .collect();
    let asked = |look: &dyn Fn() -> pdkv_core::Result<()>| {
        let calls = || calls(path).get("cuPointerGetAttribute").copied().unwrap_or(0);
        let before = calls();
        look().unwrap();
        calls() - before
    };
    let few = Witnesses::of(&regions[..4]);
    let many = Witnesses::of(&regions);
    assert_eq!(asked(&|| few.still_there()), 8);
    assert_eq!(asked(&|| many.still_there()), 80);
    assert_eq!(asked(&|| few.glance()), 8);
    for _ in 0..10 {
        assert_eq!(asked(&|| many.glance()), 8);
    }
    // One alone, which no allocator replaces: found all the same within one round.
    replace(path, buffers[17].address());
    let found: Vec<_> = (0..10).filter_map(|_| many.glance().err()).collect();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].kind(), ErrorKind::Region);
    few.glance().unwrap();
}

#[test]
fn gpus_reach_each_other_or_say_why_not() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let (gpu, next) = (Gpu::open_on(&driver, 0).unwrap(), Gpu::open_on(&driver, 1).unwrap());
    assert_ne!(gpu.uuid(), next.uuid());
    gpu.reaches(&gpu).unwrap();
    gpu.reaches(&next).unwrap();
    let asked = counts(path)["calls cuCtxEnablePeerAccess"];
    gpu.reaches(&next).unwrap();
    assert_eq!(counts(path)["calls cuCtxEnablePeerAccess"], asked, "once is enough");
    let pool = DeviceRegion::allocate(&next, 64).unwrap();
    let part = pool.part(8, 8).unwrap();
    part.reached_by(&next).unwrap();
    part.reached_by(&gpu).unwrap();
    part.write_at(0, b"12345678").unwrap();
    let here = DeviceRegion::allocate(&gpu, 8).unwrap();
    kernel_copy(&gpu, part.address(), here.address(), 8);
    let mut bytes = [0; 8];
    here.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"12345678", "a kernel reads the other GPU's memory");
    let other = DeviceRegion::allocate(&next, 64).unwrap();
    fail(path, c"cuMemSetAccess", 1, 2);
    let failed = other.reached_by(&gpu).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Device, "of the moment: {failed}");
    other.reached_by(&gpu).unwrap();
    let asked = counts(path)["calls cuMemSetAccess"];
    pool.reached_by(&gpu).unwrap();
    assert_eq!(counts(path)["calls cuMemSetAccess"], asked, "once is enough");
    let pool = other_memory(path, 1, 4096, 0);
    let reason = region(&next, pool, 64).unwrap().reached_by(&gpu).unwrap_err();
    assert_eq!(reason.kind(), ErrorKind::Unsupported);
    assert!(reason.message().contains("`cuMemSetAccess` returned"), "{reason}");
    let before = alive(path);
    let again = Gpu::open_on(&driver, 0).unwrap();
    assert_eq!(again.ordinal(), 0);
    assert_eq!(alive(path), before, "a GPU is opened once");
}

#[test]
fn host_memory_is_registered_once_and_as_long_as_it_is_needed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let registered = || alive(path).get("registered memory").copied().unwrap_or(0);
    let pool = HostRegion::allocate(1 << 20, HugePages::Never).unwrap();
    let part = pool.part(5000, 100).unwrap();
    let access = HostAccess::of(&gpu, &part).unwrap();
    assert_eq!((access.device_address(), access.len()), (part.address(), 100));
    let next = Gpu::open_on(&driver, 1).unwrap();
    let more = HostAccess::of(&next, &pool).unwrap();
    assert_eq!(registered(), 1, "one registration serves parts, the whole and all GPUs");
    drop(access);
    assert_eq!(registered(), 1);

    let overlap = pool.address() + 4096;
    // SAFETY: the pool lives longer.
    let overlap = unsafe { HostRegion::from_raw(overlap, 2 << 20, Box::new(())) }.unwrap();
    let error = HostAccess::of(&gpu, &overlap).unwrap_err();
    assert!(error.message().contains("registered already"), "{error}");
    assert!(error.hint().unwrap().contains("the whole"), "{error:?}");
    drop(overlap);
    drop(more);
    assert_eq!(registered(), 0);

    let pinned = PinnedBuffer::new(gpu.context(), 8192).unwrap();
    // SAFETY: the buffer lives longer.
    let region = unsafe { HostRegion::from_raw(pinned.address() + 8, 100, Box::new(())) }.unwrap();
    let access = HostAccess::of(&gpu, &region).unwrap();
    assert_eq!((access.device_address(), registered()), (pinned.address() + 8, 0));

    // SAFETY: it is refused.
    let beyond = unsafe { HostRegion::from_raw(pinned.address() + 8, 1 << 20, Box::new(())) }.unwrap();
    let error = HostAccess::of(&gpu, &beyond).unwrap_err();
    assert!(error.message().contains("pinned or registered already"), "{error}");
    drop(beyond);

    let fd = pool.shared().unwrap().fd.try_clone_to_owned().unwrap();
    let readable = HostRegion::map_peer(fd, 1 << 20, false).unwrap();
    let access = HostAccess::of(&gpu, &readable).unwrap();
    assert_eq!(
        registered(),
        1,
        "memory that a peer lets be read is registered for that"
    );
    drop((access, readable));
    fail(path, c"cuMemHostRegister_v2", 1, 2);
    assert_eq!(HostAccess::of(&gpu, &pool).unwrap_err().kind(), ErrorKind::Device);
    assert_eq!(registered(), 0);
}

/// In a process of its own, whose environment names the stand-in as the driver: what it finds of addresses, and of a fork.
#[test]
fn stranger() {
    let Some(mut socket) = parent() else {
        return;
    };
    let plain = [0_u8; 64];
    let plain = plain.as_ptr().expose_provenance() as u64;
    assert!(Gpu::holding(plain).unwrap().is_none(), "no driver is loaded for a look");
    assert!(Gpu::number_if_started([0; 16]).unwrap().is_none(), "nor is one started");
    let gpu = Gpu::open(1).unwrap();
    assert_eq!(Gpu::count().unwrap(), 2);
    assert_eq!(Gpu::number_of(gpu.uuid()).unwrap(), Some(1));
    assert_eq!(Gpu::number_of([0; 16]).unwrap(), None);
    assert_eq!(Gpu::number_if_started(gpu.uuid()).unwrap(), Some(Some(1)));
    assert!(Gpu::opened(1).unwrap().is_some() && Gpu::opened(9).unwrap().is_none());
    let path = std::env::var("PDKV_CUDA_LIBRARY").unwrap();
    let memory = DeviceRegion::allocate(&gpu, 100).unwrap();
    let error = DeviceRegion::allocate(&gpu, 100).unwrap_err();
    assert!(
        error.message().contains("OUT_OF_MEMORY"),
        "the environment says what fails: {error}"
    );
    let pinned = PinnedBuffer::new(gpu.context(), 64).unwrap();
    let found = |address| Gpu::holding(address).unwrap().map(|gpu| gpu.ordinal());
    assert_eq!(found(memory.address() + 99), Some(1));
    assert_eq!((found(pinned.address()), found(plain)), (None, None));
    let managed = other_memory(path.as_ref(), 0, 64, 1);
    assert_eq!(Gpu::holding(managed).unwrap_err().kind(), ErrorKind::Unsupported);
    // SAFETY: neither is used before it is dropped.
    let host = |address, len| unsafe { HostRegion::from_raw(address, len, Box::new(())) }.unwrap();
    for region in [host(plain, 64), host(pinned.address() + 8, 8)] {
        HostAccess::of(&gpu, &region).unwrap();
    }
    let beyond = HostAccess::of(&gpu, &host(pinned.address() + 8, 64)).unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::Unsupported, "{beyond}");
    let next = Gpu::open(0).unwrap();
    let missing = std::thread::spawn(move || Gpu::holding(plain)).join().unwrap();
    assert!(missing.unwrap().is_none(), "threads without a context ask as well");
    let refused = next.reaches(&gpu).unwrap_err();
    assert!(refused.message().contains("no peer access"), "{refused}");

    // SAFETY: the child does nothing but ask, and ends without running destructors or exit handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let typed = Gpu::open(0)
            .is_err_and(|error| error.kind() == ErrorKind::Unsupported && error.message().contains("is a fork"));
        let reads = memory
            .read_at(0, &mut [0])
            .is_err_and(|error| error.kind() == ErrorKind::Unsupported);
        let none = Gpu::holding(plain).is_ok_and(|gpu| gpu.is_none());
        drop(memory);
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::from(typed) + 2 * i32::from(reads) + 4 * i32::from(none)) };
    }
    let mut status = 0;
    // SAFETY: a child of ours, and an integer to write to.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 7, "a fork is refused in words");
    memory.write_at(0, b"still here").unwrap();
    tell(&mut socket, 1);
}

#[test]
fn the_environment_names_the_driver_and_forks_are_refused() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((_, path)) = whole() else {
        return;
    };
    let path = path.to_str().unwrap();
    for strict in ["0", "1"] {
        let environment = [
            (MADE, path),
            ("PDKV_CUDA_LIBRARY", path),
            ("PDKV_STANDIN_PEERS", "0"),
            ("PDKV_STANDIN_STRICT", strict),
            ("PDKV_STANDIN_FAIL", "cuMemCreate:2:2,cuMemAlloc_v2:1:2"),
        ];
        let mut other = Other::start_with("memory::stranger", &environment);
        assert_eq!(other.word(), 1);
        assert!(other.child.wait().unwrap().success());
    }
}

/// In a process of its own: the CPU goes where only the device may.
#[test]
fn trespasser() {
    let Some(path) = std::env::var_os("PDKV_TEST_TRESPASS") else {
        return;
    };
    let driver = pdkv_device::cuda::Driver::open_at(path.as_ref()).unwrap();
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    let memory = DeviceRegion::allocate(&gpu, 64).unwrap();
    assert!(matches!(memory.share().unwrap()[0].handle, Handle::Fd(_)));
    let byte: *const u8 = std::ptr::with_exposed_provenance(memory.address() as usize);
    // SAFETY: none: what is meant to be shown is that the process ends here.
    let byte = unsafe { byte.read_volatile() };
    panic!("the CPU has read {byte} of the device");
}

#[test]
fn the_stand_in_keeps_the_cpu_out_of_device_memory() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((_, path)) = whole() else {
        return;
    };
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::trespasser", "--test-threads=1"])
        .env("PDKV_TEST_TRESPASS", path)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status:?}");
}
