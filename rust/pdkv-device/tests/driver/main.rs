//! The face on the CUDA driver, over a stand-in that runs on the host: loading, lives of handles, order, launches, refusals.

#![allow(clippy::print_stdout, reason = "a test says what it skipped")]

mod allocations;
mod alone;
mod bulk;
mod caches;
#[path = "../common/mod.rs"]
mod common;
mod courier;
mod find;
mod flag;
mod memory;
mod order;
mod queue;
mod sharing;
mod staging;
mod standin;
mod verified;

use std::path::Path;

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{
    DeviceBuffer, Driver, Event, Extent, Gpu, IpcHandle, IpcMapping, MemoryKind, Module, PinnedBuffer, Stream,
    copy_async, pointer_facts,
};

use alone::Alone;
use standin::{IMAGE, alive, compile, counts, since, variant};

#[test]
fn what_cannot_be_used_is_a_value_with_its_reason() {
    let error = Driver::open_at(Path::new("/nowhere/libcuda.so.1")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("no CUDA driver"), "{error}");
    let cases = [
        (
            "old",
            "PDKV_STANDIN_VERSION=11040",
            "speaks CUDA `11.4`, `12.0` or newer",
        ),
        ("none", "PDKV_STANDIN_INIT=100", "finds no device"),
        ("hidden", "PDKV_STANDIN_DEVICES=0", "finds no device"),
        (
            "broken",
            "PDKV_STANDIN_INIT=802",
            "does not start: `cuInit` returned `802`",
        ),
    ];
    for (name, setting, part) in cases {
        let Some(path) = variant(name, &[setting]) else {
            return;
        };
        let error = Driver::open_at(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}");
        assert!(error.message().contains(part), "{name}: {error}");
    }
    let partial = compile("partial", &["STANDIN_BARE", "STANDIN_LACKS_IPC"]).unwrap();
    let error = Driver::open_at(&partial).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("lacks `cuIpcGetMemHandle`"), "{error}");
}

#[test]
fn an_instance_of_mig_is_cut_off() {
    let Some(path) = variant("mig", &["PDKV_STANDIN_NAME=NVIDIA H200 MIG 1g.18gb"]) else {
        return;
    };
    let driver = Driver::open_at(&path).unwrap();
    let (gpu, next) = (Gpu::open_on(&driver, 0).unwrap(), Gpu::open_on(&driver, 1).unwrap());
    assert!(gpu.isolated().unwrap().contains("MIG instance"));
    gpu.reaches(&gpu).unwrap();
    assert!(gpu.reaches(&next).unwrap_err().message().contains("MIG instance"));
}

#[test]
fn a_device_is_described_and_a_missing_one_refused() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let driver = &alone.driver;
    assert_eq!((driver.version(), driver.device_count().unwrap()), ((13, 0), 2));
    let device = driver.device(1).unwrap();
    assert_eq!(
        (device.ordinal(), device.name().unwrap().as_str()),
        (1, "Stand-in H200")
    );
    assert_eq!(device.isolated().unwrap(), None);
    let facts = device.facts().unwrap();
    assert_eq!(
        (facts.capability, facts.multiprocessors, facts.block_shared_bytes),
        ((9, 0), 3, 227 << 10)
    );
    let error = driver.device(2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.message().contains("`cuDeviceGet` returned `101`"), "{error}");
}

#[test]
fn handles_end_with_their_last_user_and_threads_keep_their_context() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let path = alone.path;
    let before = alive(path);
    let stream = {
        let context = alone.context();
        let stream = Stream::new(&context).unwrap();
        let event = Event::new(&context).unwrap();
        let memory = DeviceBuffer::new(&context, 100).unwrap();
        let pinned = PinnedBuffer::new(&context, 100).unwrap();
        event.record(&stream).unwrap();
        stream.wait(&event).unwrap();
        // SAFETY: the image is whole.
        let module = unsafe { Module::load(&context, IMAGE) }.unwrap();
        let function = module.function("pdkv2_copy_tiles_1", 0).unwrap();
        drop(module);
        assert_eq!(since(path, &before)["modules"], 1, "a function keeps its module");
        drop((function, event, memory, pinned));
        stream
    };
    let left = since(path, &before);
    assert_eq!(
        left.iter()
            .map(|(name, count)| (name.as_str(), *count))
            .collect::<Vec<_>>(),
        [("contexts", 1), ("streams", 1)]
    );
    assert!(
        !counts(path).contains_key("blocking streams"),
        "our streams wait for no other"
    );
    assert!(
        !counts(path).contains_key("urgent streams"),
        "nor do others wait for ours"
    );
    // SAFETY: the default stream is there as long as the context.
    let foreign = unsafe { Stream::foreign(stream.context(), 0) };
    assert!(foreign.done().unwrap());
    drop(foreign);
    std::thread::spawn(move || drop(stream)).join().unwrap();
    assert!(since(path, &before).is_empty(), "{:?}", since(path, &before));
}

#[test]
fn what_is_asked_happens_in_order_and_is_waited_for() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let context = alone.context();
    let (stream, event) = (Stream::new(&context).unwrap(), Event::new(&context).unwrap());
    assert!(event.passed().unwrap() && stream.done().unwrap());
    let memory = DeviceBuffer::new(&context, 64).unwrap();
    let pinned = PinnedBuffer::new(&context, 64).unwrap();
    let mut bytes = [1; 64];
    pinned.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64], "fresh pinned memory shows nobody's bytes");
    pinned.write(8, b"bytes").unwrap();
    memory.fill(&stream, 7).unwrap();
    // SAFETY: both buffers live until the stream has passed.
    unsafe { copy_async(&stream, memory.address() + 16, pinned.address() + 8, 5) }.unwrap();
    event.record(&stream).unwrap();
    assert!(!event.passed().unwrap() && !stream.done().unwrap());
    event.synchronize().unwrap();
    assert!(event.passed().unwrap() && stream.done().unwrap());
    memory.read(&stream, 15, &mut bytes[..7]).unwrap();
    assert_eq!(&bytes[..7], b"\x07bytes\x07");
    memory.write(&stream, 60, b"tail").unwrap();
    memory.read(&stream, 59, &mut bytes[..5]).unwrap();
    assert_eq!(&bytes[..5], b"\x07tail");
    // SAFETY: nothing is copied.
    unsafe { copy_async(&stream, 0, 0, 0) }.unwrap();
    for error in [
        memory.write(&stream, 61, b"tail").unwrap_err(),
        memory.read(&stream, usize::MAX, &mut bytes).unwrap_err(),
        pinned.write(64, b"x").unwrap_err(),
        pinned.read(1, &mut bytes).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Region);
    }
    assert_eq!(
        (memory.len(), pinned.len(), memory.is_empty(), pinned.is_empty()),
        (64, 64, false, false)
    );
    let error = DeviceBuffer::new(&context, 1 << 50).unwrap_err();
    assert!(
        error.message().contains("`2` (CUDA_ERROR_OUT_OF_MEMORY: words"),
        "{error}"
    );
}

#[test]
fn an_address_is_looked_up() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let context = alone.driver.device(1).unwrap().context().unwrap();
    let memory = DeviceBuffer::new(&context, 64).unwrap();
    let pinned = PinnedBuffer::new(&context, 64).unwrap();
    let facts = pointer_facts(&context, memory.address() + 63).unwrap().unwrap();
    assert_eq!(
        (facts.kind, facts.ordinal, facts.ipc),
        (MemoryKind::Device, Some(1), true)
    );
    assert_eq!((facts.base, facts.len), (memory.address(), 64));
    let facts = pointer_facts(&context, pinned.address()).unwrap().unwrap();
    assert_eq!((facts.kind, facts.ordinal, facts.ipc), (MemoryKind::Host, None, false));
    assert_eq!(pointer_facts(&context, 4096).unwrap(), None);
}

#[test]
fn handles_of_this_process_and_of_nobody_are_refused() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let context = alone.context();
    let memory = DeviceBuffer::new(&context, 64).unwrap();
    let handle = IpcHandle::of(&context, memory.address()).unwrap();
    let error = IpcMapping::open(&context, &handle).unwrap_err();
    assert!(error.message().contains("returned `201`"), "{error}");
    assert!(error.hint().unwrap().contains("its own memory"), "{error:?}");
    assert_eq!(IpcHandle::of(&context, 4096).unwrap_err().kind(), ErrorKind::Device);
    let error = IpcMapping::open(&context, &IpcHandle([0; 64])).unwrap_err();
    assert!(
        error.message().contains("`cuIpcOpenMemHandle_v2` returned `400`"),
        "{error}"
    );
    assert!(!alive(alone.path).contains_key("mappings"));
}

#[test]
fn images_kernels_and_launches_that_are_wrong_are_refused() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let context = alone.context();
    for (image, part) in [
        (b"\x7fELF".as_slice(), "neither a cubin nor PTX"),
        (b".version 8.0 without an end", "neither a cubin nor PTX"),
        (b"\x7fELFsomething else", "`cuModuleLoadData` returned `200`"),
    ] {
        // SAFETY: whole, or refused before the driver sees it.
        let error = unsafe { Module::load(&context, image) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        assert!(error.message().contains(part), "{error}");
    }
    // SAFETY: the image is whole.
    let module = unsafe { Module::load(&context, IMAGE) }.unwrap();
    let error = module.function("nobody", 0).unwrap_err();
    assert!(format!("{error:?}").contains("kernel: nobody"), "{error:?}");
    assert!(module.function("pdkv2_copy_bulk", 1 << 20).is_err());
    let function = module.function("pdkv2_copy_bulk", 0).unwrap();
    let stream = Stream::new(&context).unwrap();
    for extent in [(0, 32, 0), (1, 2048, 0), (1, 32, 49 << 10)] {
        let extent = Extent {
            grid: extent.0,
            block: extent.1,
            shared_bytes: extent.2,
        };
        // SAFETY: the launch is refused.
        let error = unsafe { function.launch(&stream, extent, &[0; 400]) }.unwrap_err();
        assert!(error.message().contains("`cuLaunchKernel` returned `1`"), "{error}");
    }
    assert_eq!(counts(alone.path)["depth"], 0);
}
