//! In which order a device does what it is asked, when that was, batches, and what fails there.

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{
    DeviceBuffer, DeviceMapping, DeviceRegion, Driver, Event, Gpu, HostAccess, PinnedBuffer, Stream, copy_async,
    copy_batch_async, has_batch,
};
use pdkv_device::{HostRegion, HugePages};

use crate::alone::Alone;
use crate::standin::{capture, counts, fail, hold, kernel_copy, reset, variant};

/// Copies from one stream's memory to another's, with or without waiting, and says whether the bytes were there.
fn hand_over(gpu: &Gpu, wait: bool) -> bool {
    let context = gpu.context();
    let (first, second) = (Stream::new(context).unwrap(), Stream::new(context).unwrap());
    let (from, to) = (
        DeviceBuffer::new(context, 64).unwrap(),
        DeviceBuffer::new(context, 64).unwrap(),
    );
    from.write(&first, 0, &[0; 64]).unwrap();
    from.fill(&first, 7).unwrap();
    let event = Event::new(context).unwrap();
    event.record(&first).unwrap();
    if wait {
        second.wait(&event).unwrap();
    }
    // SAFETY: both buffers live until the stream is waited for.
    unsafe { copy_async(&second, to.address(), from.address(), 64) }.unwrap();
    let mut bytes = [0; 64];
    to.read(&second, 0, &mut bytes).unwrap();
    bytes == [7; 64]
}

#[test]
fn a_stream_waits_for_another_where_it_is_told_to() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = alone.gpu();
    assert!(hand_over(&gpu, true));
    assert!(!hand_over(&gpu, false), "the stand-in shows a wait that is missing");
}

#[test]
fn asking_brings_an_end_and_a_hold_keeps_it_off() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = alone.gpu();
    let memory = DeviceBuffer::new(gpu.context(), 64).unwrap();
    let event = Event::new(gpu.context()).unwrap();
    hold(alone.path, 1);
    memory.fill(gpu.stream(), 1).unwrap();
    event.record(gpu.stream()).unwrap();
    for _ in 0..5 {
        assert!(!event.passed().unwrap());
    }
    let waiter = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| event.synchronize());
        hold(alone.path, 0);
        waiter.join().unwrap()
    });
    waiter.unwrap();
    memory.fill(gpu.stream(), 2).unwrap();
    event.record(gpu.stream()).unwrap();
    let polls = (0..3).take_while(|_| !event.passed().unwrap()).count();
    assert_eq!(polls, 1, "each look is a step");
}

#[test]
fn timed_events_tell_how_long_something_took() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = alone.gpu();
    let (start, end) = (
        Event::timed(gpu.context()).unwrap(),
        Event::timed(gpu.context()).unwrap(),
    );
    let word = PinnedBuffer::new(gpu.context(), 16).unwrap();
    start.record(gpu.stream()).unwrap();
    // SAFETY: the word lives until the stream is waited for.
    unsafe { gpu.stream().write_value(word.address() + 8, 0x0102_0304_0506_0708) }.unwrap();
    end.record(gpu.stream()).unwrap();
    let error = end.elapsed_us(&start).unwrap_err();
    assert!(
        error.message().contains("`cuEventElapsedTime` returned `600`"),
        "{error}"
    );
    end.synchronize().unwrap();
    assert!(end.elapsed_us(&start).unwrap() >= 0.0);
    let untimed = Event::new(gpu.context()).unwrap();
    untimed.record(gpu.stream()).unwrap();
    assert_eq!(untimed.elapsed_us(&start).unwrap_err().kind(), ErrorKind::Device);
    let mut bytes = [0; 16];
    word.read(0, &mut bytes).unwrap();
    assert_eq!(u128::from_le_bytes(bytes), 0x0102_0304_0506_0708 << 64);
}

/// Many copies at once, by a driver of some release.
fn in_batches(driver: &Driver) {
    let gpu = Gpu::open_on(driver, 0).unwrap();
    let (context, stream) = (gpu.context(), Stream::new(gpu.context()).unwrap());
    let (host, memory) = (
        PinnedBuffer::new(context, 64).unwrap(),
        DeviceBuffer::new(context, 64).unwrap(),
    );
    host.write(0, b"0123456789abcdef").unwrap();
    memory.fill(&stream, b'.').unwrap();
    let (to, from) = (memory.address(), host.address());
    let (dsts, srcs, sizes) = ([to + 8, to, to + 20], [from, from + 4, from + 9], [3, 4, 1]);
    // SAFETY: all of it lives until the stream is waited for.
    let batch = |dsts: &[u64], sizes: &[usize]| unsafe { copy_batch_async(&stream, dsts, &srcs, sizes) };
    let error = batch(&dsts[..2], &sizes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Layout);
    batch(&dsts, &sizes).unwrap();
    let mut bytes = [0; 24];
    memory.read(&stream, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"4567....012.........9...");
    // SAFETY: nothing is copied.
    unsafe { copy_batch_async(&stream, &[], &[], &[]) }.unwrap();
    // SAFETY: the default stream is there as long as the context.
    let default = unsafe { Stream::foreign(context, 0) };
    // SAFETY: it is refused.
    let error = unsafe { copy_batch_async(&default, &dsts, &srcs, &sizes) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    if driver.version() < (13, 0) {
        let error = batch(&dsts, &[3, 0, 1]).unwrap_err();
        assert!(format!("{error:?}").contains("copy: 1"), "{error:?}");
    }
}

#[test]
fn copies_go_in_batches_where_the_driver_has_them() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    in_batches(&alone.driver);
    let of = |name: &str, version: &str| Driver::open_at(&variant(name, &[version]).unwrap()).unwrap();
    in_batches(&of("12-8", "PDKV_STANDIN_VERSION=12080"));
    let old = Gpu::open_on(&of("12-4", "PDKV_STANDIN_VERSION=12040"), 0).unwrap();
    assert!(!has_batch(old.context()));
    // SAFETY: the driver has no such call.
    let error = unsafe { copy_batch_async(old.stream(), &[1], &[2], &[3]) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("CUDA `12.4` has no batched copies"), "{error}");
}

#[test]
fn what_fails_on_the_device_shows_at_the_next_look() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = alone.gpu();
    let memory = DeviceBuffer::new(gpu.context(), 64).unwrap();
    let event = Event::new(gpu.context()).unwrap();
    fail(alone.path, c"run", 2, 719);
    memory.fill(gpu.stream(), 1).unwrap();
    memory.fill(gpu.stream(), 2).unwrap();
    event.record(gpu.stream()).unwrap();
    assert!(!event.passed().unwrap(), "the first was well");
    let error = event.passed().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.message().contains("`cuEventQuery` returned `719`"), "{error}");
    let error = DeviceRegion::allocate(&gpu, 64).unwrap_err();
    assert!(error.message().contains("returned `719`"), "it stays: {error}");
    reset(alone.path);

    fail(alone.path, c"cuMemCreate", 1, 2);
    let region = DeviceRegion::allocate(&gpu, 64).unwrap();
    assert!(
        matches!(region.share().unwrap()[0].handle, pdkv_device::cuda::Handle::Ipc(_)),
        "without one kind of memory there is the other"
    );
    fail(alone.path, c"cuMemCreate", 1, 2);
    fail(alone.path, c"cuMemAlloc_v2", 1, 2);
    let error = DeviceRegion::allocate(&gpu, 64).unwrap_err();
    assert!(error.message().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    assert_eq!(counts(alone.path)["depth"], 0);
}

#[test]
fn a_capture_of_somebody_elses_goes_on() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = alone.gpu();
    let captured = Stream::new(gpu.context()).unwrap();
    let other = Stream::new(gpu.context()).unwrap();
    assert!(!captured.capturing().unwrap());
    // SAFETY: the default stream is there as long as the context.
    let default = unsafe { Stream::foreign(gpu.context(), 0) };
    capture(alone.path, 0, true);
    assert!(default.capturing().unwrap(), "a stream that waits for it is captured");
    capture(alone.path, 0, false);
    capture(alone.path, captured.address(), true);
    assert!(captured.capturing().unwrap() && !other.capturing().unwrap());
    assert!(!default.capturing().unwrap(), "streams like torch's leave it alone");
    let region = DeviceRegion::allocate(&gpu, 64).unwrap();
    let pool = HostRegion::allocate(4096, HugePages::Never).unwrap();
    let access = HostAccess::of(&gpu, &pool).unwrap();
    kernel_copy(&gpu, access.device_address(), region.address(), 64);
    let event = Event::new(gpu.context()).unwrap();
    event.record(&other).unwrap();
    assert!(event.passed().unwrap());
    let mapping = DeviceMapping::open(&gpu, 64, &region.share().unwrap()).unwrap();
    kernel_copy(&gpu, mapping.address(), region.address(), 64);
    let laid = counts(alone.path)["laid"];
    drop((access, event, mapping));
    assert_eq!(counts(alone.path)["laid"], laid - 1);
    assert_eq!(
        counts(alone.path).get("broken captures"),
        None,
        "our calls are no part of it"
    );
    // Memory whose users cannot be waited for now is left to them.
    let before = counts(alone.path)["reservations"];
    drop(region);
    assert_eq!(counts(alone.path)["reservations"], before);
    capture(alone.path, captured.address(), false);
    drop(DeviceRegion::allocate(&gpu, 64).unwrap());
    assert_eq!(counts(alone.path)["reservations"], before);
}

#[test]
fn memory_outlives_what_the_device_may_still_do_there() {
    let Some(alone) = Alone::begin() else {
        return;
    };
    let gpu = alone.gpu();
    let region = DeviceRegion::allocate(&gpu, 64).unwrap();
    hold(alone.path, 1);
    fail(alone.path, c"cuStreamSynchronize", 1, 900);
    let mut bytes = [1; 64];
    let error = region.read_at(0, &mut bytes).unwrap_err();
    assert!(error.message().contains("returned `900`"), "{error}");
    hold(alone.path, 0);
    gpu.stream().synchronize().unwrap();
    assert_eq!(bytes, [1; 64], "what comes late does not come here");

    // Somebody's kernel that still writes when a pool goes.
    let stream = Stream::new(gpu.context()).unwrap();
    let from = DeviceRegion::allocate(&gpu, 64).unwrap();
    // SAFETY: the pool lives until the device is done, which is what is shown.
    unsafe { copy_async(&stream, region.address(), from.address(), 64) }.unwrap();
    drop(region);
    assert!(stream.done().unwrap(), "a pool waits for its users");
}
