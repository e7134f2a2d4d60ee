//! Plans from tables to launches: uploaded, launched by the stand-in, told by a flag, and compared with the planner's walk.

use std::ops::ControlFlow;
use std::sync::PoisonError;

use pdkv_core::ErrorKind;
use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::layout::{KvLayout, KvLayoutParts, LayerLayout, Plane};
use pdkv_core::plan::{Plan, Selection};
use pdkv_device::cuda::{DeviceBuffer, Kernels, PinnedBuffer, Stream};
use pdkv_device::kernels::{Checksum, Logical, PageTables, Wishes, jobs, reference};

use crate::standin::{ALONE, IMAGE, alive, whole};

/// Two layers in regions of their own, heads before tokens or after them.
fn layout(blocks: u32, heads_first: bool, content_bytes: u64) -> KvLayout {
    let (heads, tokens) = (2, 4);
    let block = content_bytes * 8;
    let (head_stride, token_stride) = if heads_first {
        (content_bytes * 4, content_bytes)
    } else {
        (content_bytes, content_bytes * 2)
    };
    let layer = |region| LayerLayout {
        planes: [0, u64::from(blocks) * block]
            .map(|offset| Plane { region, offset })
            .to_vec(),
        block_stride: block,
        head_stride,
        token_stride,
    };
    KvLayout::from_parts(KvLayoutParts {
        dtype: DType::U8,
        num_blocks: blocks,
        num_heads: heads,
        block_tokens: tokens,
        token_rows: tokens,
        content_bytes,
        layers: vec![layer(0), layer(1)],
        layer_names: vec!["a".to_owned(), "b".to_owned()],
        region_bytes: vec![u64::from(blocks) * block * 2; 2],
    })
    .unwrap()
}

struct Flat {
    regions: Vec<(u64, Vec<u8>)>,
}

impl Flat {
    fn find(&self, address: u64) -> (usize, usize) {
        let holds = |(base, bytes): &(u64, Vec<u8>)| address >= *base && address - base < bytes.len() as u64;
        let region = self.regions.iter().position(holds).unwrap();
        (region, (address - self.regions[region].0) as usize)
    }
}

impl reference::Memory for Flat {
    fn read(&self, address: u64, bytes: &mut [u8]) {
        let (region, at) = self.find(address);
        bytes.copy_from_slice(&self.regions[region].1[at..at + bytes.len()]);
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let (region, at) = self.find(address);
        self.regions[region].1[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

#[test]
fn a_plan_is_launched_and_its_end_is_told() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
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
        let (from, to) = (layout(5, true, content), layout(4, same, content));
        let plan = Plan::pages(
            &from,
            &BlockTable::from_ids(&[4, 0, 1]),
            &to,
            &BlockTable::from_ids(&[1, 3, 2]),
            &Selection::all(&from),
        )
        .unwrap();
        let buffers = |layout: &KvLayout| -> Vec<_> {
            let sizes = layout.region_bytes().iter();
            sizes
                .map(|&bytes| DeviceBuffer::new(&context, bytes as usize).unwrap())
                .collect()
        };
        let (src, dst) = (buffers(&from), buffers(&to));
        let mut flat = Flat { regions: Vec::new() };
        for (number, buffer) in src.iter().chain(&dst).enumerate() {
            let bytes: Vec<u8> = (0..buffer.len())
                .map(|at| (at * 31 + number * 7 + at / 251) as u8)
                .collect();
            buffer.write(&stream, 0, &bytes).unwrap();
            flat.regions.push((buffer.address(), bytes));
        }
        let addresses = |buffers: &[DeviceBuffer]| buffers.iter().map(DeviceBuffer::address).collect::<Vec<_>>();
        let geometry = plan.geometry().unwrap();
        let work = jobs(&geometry, &addresses(&src), &addresses(&dst), Logical::Plan).unwrap();
        let tables = PageTables::of(&geometry);
        let mut expected = flat.regions.clone();
        let _ = plan.walk(0..plan.unit_count(), |run| {
            let from = flat.regions[run.src.region as usize].1[run.src.offset as usize..][..run.len as usize].to_vec();
            expected[2 + run.dst.region as usize].1[run.dst.offset as usize..][..run.len as usize]
                .copy_from_slice(&from);
            ControlFlow::Continue(())
        });
        let mut sums = vec![Checksum::default(); 3];
        for job in &work {
            reference::run(job, &tables, &mut flat, &mut sums);
        }
        let prepared = kernels
            .prepare(&stream, &work, &tables, Wishes { sums: true, bulk })
            .unwrap();
        assert_eq!((work.len(), prepared.launch_count()), (1, 1));
        // Twice: what a launch leaves must serve the next.
        for _ in 0..2 {
            value += 1;
            // SAFETY: all buffers live until the stream is waited for, and nothing else uses them.
            unsafe { prepared.launch(&stream, Some((flag.address(), value))) }.unwrap();
            assert_eq!(told(), value - 1, "nothing has run yet");
            stream.synchronize().unwrap();
            assert_eq!(told(), value);
            let found = prepared.sums(&stream).unwrap();
            assert_eq!(found, sums.iter().map(|sum| sum.value()).collect::<Vec<_>>());
        }
        for (buffer, (_, bytes)) in src.iter().chain(&dst).zip(&expected) {
            let mut found = vec![0; buffer.len()];
            buffer.read(&stream, 0, &mut found).unwrap();
            assert!(found == *bytes, "wrong bytes with content {content}, bulk {bulk}");
        }
        let short = PageTables {
            src: Some(vec![1]),
            dst: None,
        };
        let error = kernels.prepare(&stream, &work, &short, Wishes::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Layout);
    }
    drop((flag, kernels, stream, context));
    assert!(alive(path).is_empty(), "{:?}", alive(path));
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
