//! What fails on the GPU fails the transfer, with the driver's words, and nothing else that need not.

use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{DeviceBuffer, Event, Gpu, Stream};
use pdkv_device::{HostRegion, HugePages};
use pdkv_engine::{PullOptions, RawOptions, TransportKind};

use crate::common::standin::{Hold, count, fail, is_here};
use crate::common::{LEASE, Memory, Pair, WAIT, Way, engine, memory, table, whole};
use crate::{came_over, eventually, pair, pull, pull_under_way};

#[test]
fn a_launch_that_is_refused_fails_its_transfer_alone() {
    if !is_here("failures::a_launch_that_is_refused_fails_its_transfer_alone") {
        return;
    }
    let pair = pair();
    fail(c"cuLaunchKernel", 1, 1);
    let refused = pull(&pair, &PullOptions::default());
    let error = refused.wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.message().contains("`cuLaunchKernel` returned `1`"), "{error}");
    assert!(refused.wait_quiesced(WAIT));
    pair.check(&[], 0..3);
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
    came_over(&pair);
}

#[test]
fn a_gpu_that_is_lost_fails_what_is_under_way_and_is_named_afterwards() {
    if !is_here("failures::a_gpu_that_is_lost_fails_what_is_under_way_and_is_named_afterwards") {
        return;
    }
    let pair = pair();
    let held = Hold::kernels();
    let transfers: Vec<_> = (0..3).map(|_| pull_under_way(&pair, &PullOptions::default())).collect();
    fail(c"run", 1, 719);
    drop(held);
    for transfer in &transfers {
        assert_eq!(transfer.wait(WAIT).unwrap_err().kind(), ErrorKind::Device);
        assert!(transfer.wait_quiesced(WAIT));
    }
    // Nothing can be launched any more, and that is what the next one hears, one way or the other.
    let export = pair.source.export(table(&[5]), 4, b"", 1, LEASE).unwrap();
    let next = || {
        let transfer = pair
            .target
            .pull(export.reference(), table(&[1]), &PullOptions::default())?;
        transfer.wait(WAIT)
    };
    let error = next().unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Device | ErrorKind::Unsupported),
        "{error:?}"
    );
    eventually("the reason is known before it is tried", || {
        let error = next().unwrap_err();
        error.kind() == ErrorKind::Unsupported && error.message().contains("GPU `0` can't be used")
    });
}

#[test]
fn a_gpu_that_is_lost_while_nothing_is_under_way_is_named_too() {
    if !is_here("failures::a_gpu_that_is_lost_while_nothing_is_under_way_is_named_too") {
        return;
    }
    let pair = pair();
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
    // By somebody else's kernel, behind which the transfers are to come.
    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let event = Arc::new(Event::new(gpu.context()).unwrap());
    event.record(&stream).unwrap();
    let word = DeviceBuffer::new(gpu.context(), 8).unwrap();
    fail(c"run", 1, 719);
    word.fill(&stream, 1).unwrap();
    stream.synchronize().unwrap_err();
    let export = pair.source.export(table(&[5]), 4, b"", 1, LEASE).unwrap();
    eventually("the reason is known before it is tried", || {
        let options = PullOptions {
            after: Some(Arc::clone(&event)),
            ..PullOptions::default()
        };
        let pulled = pair.target.pull(export.reference(), table(&[1]), &options);
        let error = pulled.and_then(|transfer| transfer.wait(WAIT)).unwrap_err();
        error.kind() == ErrorKind::Unsupported && error.message().contains("GPU `0` can't be used")
    });
}

#[test]
fn memory_that_is_deregistered_under_way_stays_until_the_gpu_is_out_of_it() {
    if !is_here("failures::memory_that_is_deregistered_under_way_stays_until_the_gpu_is_out_of_it") {
        return;
    }
    for [producer, consumer] in [
        [Memory::Device, Memory::Device],
        [Memory::Device, Memory::Private],
        [Memory::Private, Memory::Device],
    ] {
        let pair = Pair::new(Way::cuda(producer, consumer));
        // Once before, so that nothing has to be registered with the driver while things are held.
        pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
        let held = Hold::kernels();
        let transfer = pull_under_way(&pair, &PullOptions::default());
        let memory: Vec<_> = [pair.source.memory(), pair.target.memory()]
            .into_iter()
            .flatten()
            .map(|memory| {
                let host = memory.host().ok().map(Arc::downgrade);
                let device = memory.device().map(Arc::downgrade);
                (host, device)
            })
            .collect();
        let Pair {
            producer: owner,
            consumer: reader,
            source,
            target,
            peer,
        } = pair;
        source.deregister().unwrap();
        target.deregister().unwrap();
        drop((source, target));
        let gone = || {
            memory.iter().all(|(host, device)| {
                host.as_ref().is_none_or(|host| host.strong_count() == 0)
                    && device.as_ref().is_none_or(|device| device.strong_count() == 0)
            })
        };
        assert!(!gone());
        drop(held);
        assert!(transfer.wait_quiesced(WAIT));
        // The owner takes its word back at the fence: the cache is gone.
        assert!(transfer.wait(WAIT).is_err());
        eventually("the memory is let go", gone);
        assert_eq!(
            count("registered memory"),
            0,
            "host memory is registered with the driver still"
        );
        drop((owner, reader, peer));
    }
}

#[test]
fn host_memory_that_the_driver_refuses_once_costs_a_while_and_not_the_way() {
    if !is_here("failures::host_memory_that_the_driver_refuses_once_costs_a_while_and_not_the_way") {
        return;
    }
    let pair = Pair::new(Way::cuda(Memory::Device, Memory::Private));
    fail(c"cuMemHostRegister_v2", 1, 1);
    let asked = Instant::now();
    let error = pull(&pair, &PullOptions::default()).wait(WAIT).unwrap_err();
    assert!(
        error.message().contains("`cuMemHostRegister_v2` returned `1`"),
        "{error}"
    );
    // Meanwhile another way would be taken, if these engines had one.
    let export = pair.source.export(table(&[5, 6]), 8, b"", 1, LEASE).unwrap();
    let again = || {
        pair.target
            .pull(export.reference(), table(&[1, 2]), &PullOptions::default())
    };
    match again() {
        Err(refused) => {
            assert!(refused.to_string().contains("cuMemHostRegister_v2"), "{refused}");
            eventually("the way is there again", || {
                again().is_ok_and(|pull| pull.wait(WAIT).is_ok())
            });
        }
        // The refusal is kept in mind for 5 s, which a busy machine can miss.
        Ok(pull) => {
            assert!(asked.elapsed() > Duration::from_secs(5));
            pull.wait(WAIT).unwrap();
        }
    }
    came_over(&pair);
}

#[test]
fn host_memory_that_may_not_be_written_is_no_destination() {
    if !is_here("failures::host_memory_that_may_not_be_written_is_no_destination") {
        return;
    }
    let pair = pair();
    let pool = HostRegion::allocate(4096, HugePages::Never).unwrap();
    let fd = pool.shared().unwrap().fd.try_clone_to_owned().unwrap();
    let read_only = HostRegion::map_peer(fd, 4096, false).unwrap();
    let here = pair.consumer.register(read_only, None, false).unwrap();
    let there = pair
        .producer
        .register(memory(Memory::Device, 4096), None, true)
        .unwrap();
    let (near, far) = whole(here.id(), there.id(), 4096);
    let read = pair.peer.read(&near, &far, None, &RawOptions::default()).unwrap();
    assert_eq!(read.wait(WAIT).unwrap_err().kind(), ErrorKind::Region);
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
    came_over(&pair);
}

#[test]
fn a_driver_that_cannot_say_whether_a_copy_is_over_is_asked_again() {
    if !is_here("failures::a_driver_that_cannot_say_whether_a_copy_is_over_is_asked_again") {
        return;
    }
    let pair = pair();
    let held = Hold::kernels();
    let transfer = pull_under_way(&pair, &PullOptions::default());
    for _ in 0..3 {
        // As while somebody captures a graph: the call fails, and the kernel goes on.
        fail(c"cuEventQuery", 1, 900);
    }
    assert!(
        !transfer.wait_quiesced(Some(Duration::from_millis(50))),
        "the GPU writes on"
    );
    drop(held);
    transfer.wait(WAIT).unwrap();
    assert!(transfer.wait_quiesced(WAIT));
    came_over(&pair);
}

/// Registers memory while the driver fails `count` calls of that name for want of memory; then a read goes by the GPU all the same.
fn fails_at_first(call: &CStr, times: i64) {
    let (owner, reader) = (
        engine("owner", &[TransportKind::Cuda]),
        engine("reader", &[TransportKind::Cuda]),
    );
    let (there, here) = (memory(Memory::Device, 4096), memory(Memory::Device, 4096));
    let name = format!("calls {}", call.to_str().unwrap());
    let before = count(&name);
    for _ in 0..times {
        fail(call, 1, 2);
    }
    let there = owner.register(there, None, true).unwrap();
    let here = reader.register(here, None, true).unwrap();
    let peer = reader
        .connect(owner.address().unwrap(), Duration::from_secs(30))
        .unwrap();
    eventually("the failures", || count(&name) >= before + times);
    let (near, far) = whole(here.id(), there.id(), 4096);
    eventually("a copy by the GPU", || {
        let read = peer.read(&near, &far, None, &RawOptions::default());
        match read.and_then(|transfer| transfer.wait(WAIT)) {
            Ok(()) => true,
            Err(error) => {
                assert!(error.message().contains("returned `2`"), "{error}");
                false
            }
        }
    });
}

#[test]
fn a_gpu_that_has_no_room_for_its_streams_is_tried_again() {
    if !is_here("failures::a_gpu_that_has_no_room_for_its_streams_is_tried_again") {
        return;
    }
    // Those of the copies, and those of what is measured.
    fails_at_first(c"cuStreamCreateWithPriority", 2);
}

#[test]
fn kernels_that_could_not_be_loaded_are_loaded_later() {
    if !is_here("failures::kernels_that_could_not_be_loaded_are_loaded_later") {
        return;
    }
    fails_at_first(c"cuModuleLoadData", 1);
}
