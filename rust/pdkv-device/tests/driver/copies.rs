//! Plans that are prepared once and launched again: uploaded, launched by the stand-in, told by a flag.

use std::sync::PoisonError;

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{Kernels, PinnedBuffer, Stream};
use pdkv_device::kernels::{PageTables, Wishes};

use crate::caches::{Pair, Wish};
use crate::standin::{ALONE, IMAGE, alive, since, whole};

#[test]
fn a_plan_is_launched_and_its_end_is_told() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let before = alive(path);
    let context = driver.device(0).unwrap().context().unwrap();
    let stream = Stream::new(&context).unwrap();
    // SAFETY: the stand-in's image, whole; its kernels are those of this release.
    let kernels = unsafe { Kernels::load(&context, IMAGE) }.unwrap();
    let flag = PinnedBuffer::new(&context, 8).unwrap();
    let told = || {
        let mut word = [0; 8];
        flag.read(0, &mut word).unwrap();
        u64::from_ne_bytes(word)
    };
    let mut value = 0;
    for (same, content, bulk) in [
        (true, 512, false),
        (true, 512, true),
        (false, 512, true),
        (false, 6, false),
    ] {
        let wish = Wish {
            same,
            ..Wish::new(2, content)
        };
        let pair = Pair::new(&context, &stream, &wish);
        let (work, tables) = (&pair.jobs.list, &pair.jobs.tables);
        let wishes = Wishes {
            sums: true,
            bulk,
            most_blocks: None,
        };
        let prepared = kernels.prepare(&stream, work, tables, wishes).unwrap();
        assert_eq!((work.len(), prepared.launch_count()), (1, 1));
        // Twice: what a launch leaves must serve the next.
        for _ in 0..2 {
            value += 1;
            // SAFETY: all buffers live until the stream is waited for, and nothing else uses them.
            unsafe { prepared.launch(&stream, Some((flag.address(), value))) }.unwrap();
            assert_eq!(told(), value - 1, "nothing has run yet");
            stream.synchronize().unwrap();
            assert_eq!(told(), value);
            assert_eq!(prepared.sums(&stream).unwrap(), pair.sums);
        }
        pair.check(&stream);
        let short = PageTables {
            src: Some(vec![1]),
            dst: None,
        };
        let error = kernels.prepare(&stream, work, &short, Wishes::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Layout);
    }
    drop((flag, kernels, stream, context));
    assert!(since(path, &before).is_empty(), "{:?}", since(path, &before));
}

#[test]
fn nothing_to_copy_is_no_launch() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, _)) = whole() else {
        return;
    };
    let context = driver.device(0).unwrap().context().unwrap();
    let stream = Stream::new(&context).unwrap();
    // SAFETY: as above.
    let kernels = unsafe { Kernels::load(&context, IMAGE) }.unwrap();
    let empty = PageTables { src: None, dst: None };
    let prepared = kernels.prepare(&stream, &[], &empty, Wishes::default()).unwrap();
    assert_eq!((prepared.launch_count(), prepared.memory_bytes()), (0, 8));
    // SAFETY: there is nothing to launch.
    unsafe { prepared.launch(&stream, None) }.unwrap();
    assert!(prepared.sums(&stream).unwrap().is_empty());
}
